"""Tiers: host memory and disk, which keep the blocks that the device has no room for. Start with host_tier.py."""
