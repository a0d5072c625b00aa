"""Where blocks go when the device needs their room: the host and the disk. Start at host_tier.py."""
