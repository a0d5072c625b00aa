"""Solutions and mistakes for the steps of stage 7."""


class Step1:
    class right_renews_in_the_queue:
        """Move a known block to the back of the tier's queue, and hand evicted blocks on one at a time."""

        class HostTier:
            def store(self, block, block_hash):
                known = self.pool.cached.get(block_hash)
                if known is not None:
                    if known in self.pool.free:
                        self.pool.free.move_to_end(known)
                    self._observer.tell("renew", known, block_hash)
                    return
                if len(self.pool.free) == 0:
                    return
                target = self.pool.get_new_blocks(1)[0]
                self.blocks[target] = self._device_blocks[block]
                self._observer.tell("store", block, target, block_hash)
                self.pool.cache_block(target, block_hash)
                self.pool.free_blocks([target])
                self.num_blocks_stored += 1

        class BlockPool:
            def get_new_blocks(self, count):
                assert count <= len(self.free)
                blocks = []
                for _ in range(count):
                    block, _ = self.free.popitem(last=False)
                    block_hash = self.hashes.get(block)
                    if block_hash is not None:
                        if self._on_evict is not None:
                            self._on_evict(block, block_hash)
                        del self.hashes[block], self.cached[block_hash]
                        self._observer.tell("evict", block, block_hash, "taken")
                    self.ref_counts[block] = 1
                    blocks.append(block)
                return blocks

    class right_touches_the_pool:
        """Hold and release a known block in the tier's pool, and raise nothing if the tier is full."""

        class HostTier:
            def store(self, block, block_hash):
                if block_hash in self.pool.cached:
                    target = self.pool.cached[block_hash]
                    self.pool.touch([target])
                    self.pool.free_blocks([target])
                    self._observer.tell("renew", target, block_hash)
                    return
                try:
                    targets = self.pool.get_new_blocks(1)
                except AssertionError:
                    return
                for target in targets:
                    self.blocks[target].copy_(self._device_blocks[block])
                    self.pool.cache_block(target, block_hash)
                    self._observer.tell("store", block, target, block_hash)
                self.pool.free_blocks(targets)
                self.num_blocks_stored += len(targets)

    class wrong_keeps_the_blocks_number_only:
        """Enter the hash, and copy no bytes."""

        red = "the host's block must be a copy of device block 2"

        class HostTier:
            def store(self, block, block_hash):
                if block_hash in self:
                    held = self.hold([block_hash])
                    self.release(held)
                    self._observer.tell("renew", held[0], block_hash)
                elif self.pool.free:
                    [target] = self.pool.get_new_blocks(1)
                    self.pool.cache_block(target, block_hash)
                    self.pool.free_blocks([target])
                    self.num_blocks_stored += 1
                    self._observer.tell("store", block, target, block_hash)

    class wrong_does_not_renew:
        """Do nothing for a hash that the tier knows."""

        red = "a was used after b: d must evict b"

        class HostTier:
            def store(self, block, block_hash):
                if block_hash not in self and self.pool.free:
                    [target] = self.pool.get_new_blocks(1)
                    self.blocks[target].copy_(self._device_blocks[block])
                    self.pool.cache_block(target, block_hash)
                    self.pool.free_blocks([target])
                    self.num_blocks_stored += 1
                    self._observer.tell("store", block, target, block_hash)

    class wrong_copies_again:
        """Copy a block that the host has already."""

        red = "the second a needs no copy"

        class HostTier:
            def store(self, block, block_hash):
                if block_hash in self:
                    [target] = self.hold([block_hash])
                elif self.pool.free:
                    [target] = self.pool.get_new_blocks(1)
                else:
                    return
                self.blocks[target].copy_(self._device_blocks[block])
                self.pool.cache_block(target, block_hash)
                self.pool.free_blocks([target])
                self.num_blocks_stored += 1
                self._observer.tell("store", block, target, block_hash)

    class wrong_never_gives_the_block_back:
        """Take a block of the tier, and leave it held."""

        red = "A full tier evicts the least recently used block"

        class HostTier:
            def store(self, block, block_hash):
                if block_hash in self:
                    held = self.hold([block_hash])
                    self.release(held)
                    self._observer.tell("renew", held[0], block_hash)
                elif self.pool.free:
                    [target] = self.pool.get_new_blocks(1)
                    self.blocks[target].copy_(self._device_blocks[block])
                    self.pool.cache_block(target, block_hash)
                    self.num_blocks_stored += 1
                    self._observer.tell("store", block, target, block_hash)

    class wrong_evicts_silently:
        """Take cached blocks without a word to the tier."""

        red = "on_evict() must get"

        class BlockPool:
            def get_new_blocks(self, count):
                blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
                for block in blocks:
                    self.ref_counts[block] = 1
                    if block in self.hashes:
                        block_hash = self.hashes.pop(block)
                        del self.cached[block_hash]
                        self._observer.tell("evict", block, block_hash, "taken")
                return blocks

    class wrong_calls_nobody:
        """Call on_evict() although it may be None."""

        red = "An evicted block is handed on if there is a tier"
        unseen = "in an engine, every pool has somebody to hand its blocks on to"

        class BlockPool:
            def get_new_blocks(self, count):
                assert count <= len(self.free)
                blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
                for block in blocks:
                    self.ref_counts[block] = 1
                    if block in self.hashes:
                        block_hash = self.hashes.pop(block)
                        del self.cached[block_hash]
                        self._observer.tell("evict", block, block_hash, "taken")
                        self._on_evict(block, block_hash)
                return blocks


class Step2:
    class right_in_loops:
        """Walk through the hashes and the hits in loops."""

        class BlockManager:
            def find_hits(self, seq):
                hits = []
                if not self._enable_caching:
                    return hits
                extend_block_hashes(seq.block_hashes, seq.token_ids, self.block_size)
                for block_hash in seq.block_hashes[: (seq.num_tokens - 1) // self.block_size]:
                    if block_hash in self.pool.cached:
                        hits.append(self.pool.cached[block_hash])
                    elif block_hash in self.tier:
                        hits.append(None)
                    else:
                        break
                return hits

            def num_needed(self, seq, hits):
                needed = cdiv(seq.num_tokens, self.block_size)
                for block in hits:
                    if block is not None and self.pool.ref_counts[block] > 0:
                        needed -= 1
                return needed

    class right_counts_what_it_takes:
        """Add up the blocks to load, the idle hits and the rest."""

        class BlockManager:
            def find_hits(self, seq):
                hits, num_most = [], (seq.num_tokens - 1) // self.block_size
                if self._enable_caching:
                    extend_block_hashes(seq.block_hashes, seq.token_ids, self.block_size)
                    for block_hash in seq.block_hashes[:num_most]:
                        block = self.pool.cached.get(block_hash)
                        if block is None and block_hash not in self.tier:
                            return hits
                        hits.append(block)
                return hits

            def num_needed(self, seq, hits):
                on_host = sum(block is None for block in hits)
                idle = sum(block is not None and self.pool.ref_counts[block] == 0 for block in hits)
                return cdiv(seq.num_tokens, self.block_size) - len(hits) + on_host + idle

    class wrong_hits_on_the_device_only:
        """Leave the lookup as it was in the stage before."""

        red = "three blocks are cached, the hits are"

        class BlockManager:
            def find_hits(self, seq):
                if not self._enable_caching:
                    return []
                extend_block_hashes(seq.block_hashes, seq.token_ids, self.block_size)
                hashes = seq.block_hashes[: (seq.num_tokens - 1) // self.block_size]
                return [self.pool.cached[each] for each in takewhile(self.pool.cached.__contains__, hashes)]

    class wrong_looks_at_the_host_first:
        """Return None for each block that the host has, even if the device has it, too."""

        red = "three blocks are cached, the hits are [None, None, None]"

        class BlockManager:
            def find_hits(self, seq):
                hits = []
                extend_block_hashes(seq.block_hashes, seq.token_ids, self.block_size)
                for block_hash in seq.block_hashes[: (seq.num_tokens - 1) // self.block_size]:
                    if block_hash not in self.tier and block_hash not in self.pool.cached:
                        break
                    hits.append(None)
                return hits

    class wrong_prefers_the_host:
        """Load a block that is on both tiers."""

        red = "the first block is on both tiers now"

        class BlockManager:
            def find_hits(self, seq):
                hits = []
                if not self._enable_caching:
                    return hits
                extend_block_hashes(seq.block_hashes, seq.token_ids, self.block_size)
                for block_hash in seq.block_hashes[: (seq.num_tokens - 1) // self.block_size]:
                    if block_hash in self.tier:
                        hits.append(None)
                    elif block_hash in self.pool.cached:
                        hits.append(self.pool.cached[block_hash])
                    else:
                        break
                return hits

    class wrong_needs_no_block_for_a_hit_on_the_host:
        """Count a hit on the host like one that somebody holds."""

        red = "A hit on the host needs a block of the device"

        class BlockManager:
            def num_needed(self, seq, hits):
                num_held = sum(block is None or self.pool.ref_counts[block] > 0 for block in hits)
                return cdiv(seq.num_tokens, self.block_size) - num_held

    class wrong_counts_idle_hits_as_free:
        """Need blocks for the hits on the host, and none for those on the device."""

        red = "the idle hit leaves the free queue"

        class BlockManager:
            def num_needed(self, seq, hits):
                return cdiv(seq.num_tokens, self.block_size) - sum(block is not None for block in hits)


class Step3:
    class right_in_loops:
        """Walk through the hits in loops, wait for an event instead of a stream, and need no _load()."""

        class HostTier:
            def load(self, copies):
                event = None
                if self._stream is None:
                    for copy in copies:
                        self._device_blocks[copy.target] = self.blocks[copy.source]
                else:
                    self._stream.wait_event(torch.cuda.current_stream(self._device_blocks.device).record_event())
                    with torch.cuda.stream(self._stream):
                        for copy in copies:
                            self._device_blocks[copy.target].copy_(self.blocks[copy.source], non_blocking=True)
                        event = torch.cuda.Event()
                        event.record(self._stream)
                self.loads.append(Load(copies, event))
                self.num_blocks_loaded += len(copies)

        class BlockManager:
            def allocate(self, seq, hits):
                assert seq not in self._holders
                for block in hits:
                    if block is not None:
                        self.pool.touch([block])
                sources = []
                for i, block in enumerate(hits):
                    if block is None:
                        sources += self.tier.hold([seq.block_hashes[i]])
                targets, table = self.pool.get_new_blocks(len(sources)), list(hits)
                for i, target in zip([i for i, block in enumerate(hits) if block is None], targets, strict=True):
                    table[i] = target
                num_new = cdiv(seq.num_tokens, self.block_size) - len(hits)
                seq.block_table = table + self.pool.get_new_blocks(num_new)
                seq.num_computed_tokens = len(hits) * self.block_size
                self._holders.add(seq)
                self.prefix_cache_stats.queries += seq.num_tokens
                self.prefix_cache_stats.hits += seq.num_computed_tokens
                self._observer.tell("admit", seq, hits)
                copies = [BlockCopy(source, target) for source, target in zip(sources, targets, strict=True)]
                if not copies:
                    return
                self.tier.load(copies)
                self._observer.tell("load", seq, copies)
                self.pool.touch(targets)
                for target, i in zip(targets, [i for i, block in enumerate(hits) if block is None], strict=True):
                    self.pool.cache_block(target, seq.block_hashes[i])

    class right_releases_what_it_holds_if_there_is_no_room:
        """Check the room before anything is held, and enter loaded blocks one by one."""

        class BlockManager:
            def allocate(self, seq, hits):
                assert seq not in self._holders, f"request {seq.request_id} holds blocks already"
                if self.num_needed(seq, hits) > self.num_free_blocks:
                    raise ValueError(f"{self.num_needed(seq, hits)} blocks are needed, {self.num_free_blocks} free")
                missing = [i for i, block in enumerate(hits) if block is None]
                self.pool.touch([block for block in hits if block is not None])
                held = self.tier.hold([seq.block_hashes[i] for i in missing])
                new = self.pool.get_new_blocks(cdiv(seq.num_tokens, self.block_size) - len(hits) + len(missing))
                targets, rest = new[: len(missing)], new[len(missing) :]
                by_index = dict(zip(missing, targets, strict=True))
                seq.block_table = [by_index.get(i, block) for i, block in enumerate(hits)] + rest
                seq.num_computed_tokens = len(hits) * self.block_size
                self._holders.add(seq)
                self.prefix_cache_stats.queries += seq.num_tokens
                self.prefix_cache_stats.hits += seq.num_computed_tokens
                self._observer.tell("admit", seq, hits)
                self._load(seq, held, targets)

            def _load(self, seq, held, targets):
                if not targets:
                    return
                copies = [BlockCopy(held[i], targets[i]) for i in range(len(held))]
                self.pool.touch(targets)
                self.tier.load(copies)
                for i, block in enumerate(seq.block_table[: seq.num_computed_tokens // self.block_size]):
                    if block in targets:
                        self.pool.cache_block(block, seq.block_hashes[i])
                self._observer.tell("load", seq, copies)

    class wrong_holds_after_it_takes:
        """Take blocks of the device before the host's are held: this evicts what should be loaded."""

        red = "whose evicted blocks fill the host"

        class BlockManager:
            def allocate(self, seq, hits):
                on_device = [block for block in hits if block is not None]
                self.pool.touch(on_device)
                new = iter(self.pool.get_new_blocks(cdiv(seq.num_tokens, self.block_size) - len(on_device)))
                held = self.tier.hold([seq.block_hashes[i] for i, block in enumerate(hits) if block is None])
                seq.block_table = [next(new) if block is None else block for block in hits] + list(new)
                seq.num_computed_tokens = len(hits) * self.block_size
                self._holders.add(seq)
                self._observer.tell("admit", seq, hits)
                if held:
                    self._load(seq, held, [seq.block_table[i] for i, block in enumerate(hits) if block is None])

    class wrong_does_not_hold_the_targets:
        """Leave the targets to the sequence alone."""

        red = "Evicted blocks are loaded instead of computed"

        class BlockManager:
            def _load(self, seq, held, targets):
                copies = [BlockCopy(*pair) for pair in zip(held, targets, strict=True)]
                self.tier.load(copies)
                self._observer.tell("load", seq, copies)
                self.cache_blocks(seq, seq.num_computed_tokens)

    class wrong_caches_nothing:
        """Load blocks that no other request can find."""

        red = "the first two blocks are on the device since the request before"

        class BlockManager:
            def _load(self, seq, held, targets):
                copies = [BlockCopy(*pair) for pair in zip(held, targets, strict=True)]
                self.tier.load(copies)
                self.pool.touch(targets)
                self._observer.tell("load", seq, copies)

    class wrong_caches_under_the_first_hashes:
        """Enter loaded blocks under the first hashes of the sequence, even if the first hit is on the device."""

        red = "the output differs from the one without a cache"

        class BlockManager:
            def _load(self, seq, held, targets):
                copies = [BlockCopy(*pair) for pair in zip(held, targets, strict=True)]
                self.tier.load(copies)
                self.pool.touch(targets)
                self._observer.tell("load", seq, copies)
                for target, block_hash in zip(targets, seq.block_hashes, strict=False):
                    self.pool.cache_block(target, block_hash)

    class wrong_does_not_wait_for_the_compute_stream:
        """Copy on the load's stream at once, beside the stores and steps that were launched before."""

        red = "the load's stream must wait for the stream that computes"
        unseen = "a CPU has no streams"

        class HostTier:
            def load(self, copies):
                with torch.cuda.stream(self._stream):
                    for source, target in copies:
                        self._device_blocks[target].copy_(self.blocks[source], non_blocking=self._stream is not None)
                    self.loads.append(Load(copies, self._stream.record_event() if self._stream else None))
                self.num_blocks_loaded += len(copies)

    class wrong_releases_at_once:
        """Give the host's blocks back before the load has arrived."""

        red = "block a was evicted during its load"

        class HostTier:
            def load(self, copies):
                for source, target in copies:
                    self._device_blocks[target].copy_(self.blocks[source])
                self.release([copy.source for copy in copies])
                self.num_blocks_loaded += len(copies)

    class wrong_starts_an_empty_load:
        """Start a load at each admission, even if there is nothing to load."""

        red = "not even an empty one"
        unseen = "an empty load moves nothing"

        class BlockManager:
            def allocate(self, seq, hits):
                on_device = [block for block in hits if block is not None]
                self.pool.touch(on_device)
                held = self.tier.hold([seq.block_hashes[i] for i, block in enumerate(hits) if block is None])
                new = iter(self.pool.get_new_blocks(cdiv(seq.num_tokens, self.block_size) - len(on_device)))
                seq.block_table = [next(new) if block is None else block for block in hits] + list(new)
                seq.num_computed_tokens = len(hits) * self.block_size
                self._holders.add(seq)
                self.prefix_cache_stats.queries += seq.num_tokens
                self.prefix_cache_stats.hits += seq.num_computed_tokens
                self._observer.tell("admit", seq, hits)
                self._load(seq, held, [seq.block_table[i] for i, block in enumerate(hits) if block is None])


class Step4:
    class right_asks_in_schedule:
        """Ask for readiness in each pass of schedule(), and leave _take() as it was."""

        class BlockManager:
            def is_ready(self, seq):
                arriving = set()
                for load in self.tier.loads:
                    if not load.has_arrived():
                        arriving |= load.targets
                return not arriving.intersection(seq.block_table)

        class Scheduler:
            def schedule(self):
                output = SchedulerOutput(budget=self._max_num_batched_tokens)
                manager, num_preemptions = self._kv_cache_manager, self.num_preemptions
                for seq in list(self.running):
                    self._fork_samples(seq)
                index = 0
                while index < len(self.running) and output.budget > 0:
                    seq = self.running[index]
                    if seq.num_uncomputed_tokens > 1 or not manager.is_ready(seq):
                        index += 1
                    elif manager.can_append(seq):
                        self._take(seq, output)
                        index += 1
                    elif len(self.running) > 1:
                        self._preempt(self.running[-1], makes_room_for=seq)
                    elif cdiv(seq.num_tokens, manager.block_size) > manager.num_blocks:
                        self._fail(seq, output)
                    else:
                        break
                for seq in self.running:
                    if seq.num_uncomputed_tokens > 1 and output.budget > 0 and manager.is_ready(seq):
                        self._take(seq, output)
                while self.waiting and output.budget > 0 and num_preemptions == self.num_preemptions:
                    seq = self.waiting[0]
                    if cdiv(seq.num_tokens, manager.block_size) > manager.num_blocks:
                        self._fail(seq, output)
                        continue
                    hits = manager.find_hits(seq)
                    if not self._may_admit(seq, hits):
                        break
                    self.running.append(self.waiting.popleft())
                    manager.allocate(seq, hits)
                    for sample in [seq, *self._fork_samples(seq)]:
                        if manager.is_ready(sample) and manager.can_append(sample):
                            self._take(sample, output)
                self._observer.tell("schedule", output)
                return output

            def _take(self, seq, output):
                num_tokens = min(seq.num_uncomputed_tokens - bool(seq.to_fork), output.budget)
                if num_tokens == 0:
                    return
                copy = self._kv_cache_manager.append_slot(seq)
                if copy:
                    output.copies.append(copy)
                output.batch.append((seq, num_tokens))
                output.budget -= num_tokens

    class right_waits_before_it_runs:
        """Collect before the batch runs, and run a sequence only once its load has been collected."""

        class BlockManager:
            def is_ready(self, seq):
                return all(load.targets.isdisjoint(seq.block_table) for load in self.tier.loads)

        class LLMEngine:
            def step(self):
                self.observer.tell("begin")
                output = self.scheduler.schedule()
                self._ended += output.failed
                self.kv_cache_manager.collect_loads(wait=len(output.batch) == 0)
                if output.copies:
                    self.kv_cache.copy_blocks(output.copies)
                    self.observer.tell("copy", output.copies)
                tokens = self.model_runner.run(output.batch) if output.batch else []
                updated = [*self._ended, *self._update(output.batch, tokens)]
                self._ended = []
                self.observer.tell("end")
                return self._outputs(updated)

    class right_waits_and_schedules_again:
        """Collect first; if nothing can run, wait, and fill the same step once more."""

        class LLMEngine:
            def step(self):
                self.observer.tell("begin")
                self.kv_cache_manager.collect_loads()
                output = self.scheduler.schedule()
                self._ended += output.failed
                if not output.batch and self.host_tier.loads:
                    self.kv_cache_manager.collect_loads(wait=True)
                    output = self.scheduler.schedule()
                    self._ended += output.failed
                if output.copies:
                    self.kv_cache.copy_blocks(output.copies)
                    self.observer.tell("copy", output.copies)
                tokens = self.model_runner.run(output.batch) if output.batch else []
                updated = [*self._ended, *self._update(output.batch, tokens)]
                self._ended = []
                self.observer.tell("end")
                return self._outputs(updated)

    class wrong_is_always_ready:
        """Run a sequence that reads blocks on their way."""

        red = 'the blocks of "b" have not arrived'

        class BlockManager:
            def is_ready(self, seq):
                return True

    class wrong_waits_for_every_load:
        """Wait in each step, even if others can run."""

        red = 'the blocks of "b" have not arrived'

        class LLMEngine:
            def step(self):
                self.observer.tell("begin")
                output = self.scheduler.schedule()
                self._ended += output.failed
                if output.copies:
                    self.kv_cache.copy_blocks(output.copies)
                    self.observer.tell("copy", output.copies)
                tokens = self.model_runner.run(output.batch) if output.batch else []
                self.kv_cache_manager.collect_loads(wait=True)
                updated = [*self._ended, *self._update(output.batch, tokens)]
                self._ended = []
                self.observer.tell("end")
                return self._outputs(updated)

    class wrong_never_waits:
        """Collect what has arrived, and go round in circles if nothing can run."""

        red = "do they wait for loads, or in no queue?"

        class LLMEngine:
            def step(self):
                self.observer.tell("begin")
                output = self.scheduler.schedule()
                self._ended += output.failed
                if output.copies:
                    self.kv_cache.copy_blocks(output.copies)
                    self.observer.tell("copy", output.copies)
                tokens = self.model_runner.run(output.batch) if output.batch else []
                self.kv_cache_manager.collect_loads()
                updated = [*self._ended, *self._update(output.batch, tokens)]
                self._ended = []
                self.observer.tell("end")
                return self._outputs(updated)

    class wrong_stops_at_a_sequence_that_is_not_ready:
        """End the loop over decodes at the first sequence that has to wait."""

        red = 'the blocks of "b" have not arrived: "a" and "c" can run'

        class Scheduler:
            def schedule(self):
                output = SchedulerOutput(budget=self._max_num_batched_tokens)
                manager, num_preemptions = self._kv_cache_manager, self.num_preemptions
                for seq in list(self.running):
                    self._fork_samples(seq)
                index = 0
                while index < len(self.running) and output.budget > 0:
                    seq = self.running[index]
                    if not manager.is_ready(seq):
                        break
                    if seq.num_uncomputed_tokens > 1:
                        index += 1
                    elif manager.can_append(seq):
                        self._take(seq, output)
                        index += 1
                    elif len(self.running) > 1:
                        self._preempt(self.running[-1], makes_room_for=seq)
                    elif manager.tier.loads:
                        index += 1
                    else:
                        self._fail(seq, output)
                for seq in self.running:
                    if seq.num_uncomputed_tokens > 1 and output.budget > 0:
                        self._take(seq, output)
                while self.waiting and output.budget > 0 and num_preemptions == self.num_preemptions:
                    seq = self.waiting[0]
                    if cdiv(seq.num_tokens, manager.block_size) > manager.num_blocks:
                        self._fail(seq, output)
                        continue
                    hits = manager.find_hits(seq)
                    if not self._may_admit(seq, hits):
                        break
                    self.running.append(self.waiting.popleft())
                    manager.allocate(seq, hits)
                    for sample in [seq, *self._fork_samples(seq)]:
                        if manager.can_append(sample):
                            self._take(sample, output)
                self._observer.tell("schedule", output)
                return output

    class wrong_makes_room_for_a_sequence_that_is_not_ready:
        """Ask for readiness in _take() only."""

        red = '"b" can\'t run yet, so it needs no block'

        class Scheduler:
            def schedule(self):
                output = SchedulerOutput(budget=self._max_num_batched_tokens)
                manager, num_preemptions = self._kv_cache_manager, self.num_preemptions
                for seq in list(self.running):
                    self._fork_samples(seq)
                index = 0
                while index < len(self.running) and output.budget > 0:
                    seq = self.running[index]
                    if seq.num_uncomputed_tokens > 1:
                        index += 1
                    elif manager.can_append(seq):
                        self._take(seq, output)
                        index += 1
                    elif len(self.running) > 1:
                        self._preempt(self.running[-1], makes_room_for=seq)
                    elif manager.tier.loads:
                        index += 1
                    else:
                        self._fail(seq, output)
                for seq in self.running:
                    if seq.num_uncomputed_tokens > 1 and output.budget > 0:
                        self._take(seq, output)
                while self.waiting and output.budget > 0 and num_preemptions == self.num_preemptions:
                    seq = self.waiting[0]
                    if cdiv(seq.num_tokens, manager.block_size) > manager.num_blocks:
                        self._fail(seq, output)
                        continue
                    hits = manager.find_hits(seq)
                    if not self._may_admit(seq, hits):
                        break
                    self.running.append(self.waiting.popleft())
                    manager.allocate(seq, hits)
                    for sample in [seq, *self._fork_samples(seq)]:
                        if manager.can_append(sample):
                            self._take(sample, output)
                self._observer.tell("schedule", output)
                return output

    class wrong_fails_a_sequence_that_could_wait:
        """End the last sequence, although blocks come free when a load arrives."""

        red = '"a" fits the pool once the load has arrived'

        class Scheduler:
            def schedule(self):
                output = SchedulerOutput(budget=self._max_num_batched_tokens)
                manager, num_preemptions = self._kv_cache_manager, self.num_preemptions
                for seq in list(self.running):
                    self._fork_samples(seq)
                index = 0
                while index < len(self.running) and output.budget > 0:
                    seq = self.running[index]
                    if seq.num_uncomputed_tokens > 1 or not manager.is_ready(seq):
                        index += 1
                    elif manager.can_append(seq):
                        self._take(seq, output)
                        index += 1
                    elif len(self.running) > 1:
                        self._preempt(self.running[-1], makes_room_for=seq)
                    else:
                        self._fail(seq, output)
                for seq in self.running:
                    if seq.num_uncomputed_tokens > 1 and output.budget > 0:
                        self._take(seq, output)
                while self.waiting and output.budget > 0 and num_preemptions == self.num_preemptions:
                    seq = self.waiting[0]
                    if cdiv(seq.num_tokens, manager.block_size) > manager.num_blocks:
                        self._fail(seq, output)
                        continue
                    hits = manager.find_hits(seq)
                    if not self._may_admit(seq, hits):
                        break
                    self.running.append(self.waiting.popleft())
                    manager.allocate(seq, hits)
                    for sample in [seq, *self._fork_samples(seq)]:
                        if manager.can_append(sample):
                            self._take(sample, output)
                self._observer.tell("schedule", output)
                return output


class Step5:
    class right_compares_times:
        """Compare the seconds of a token, with names."""

        class CostModel:
            def prefers_load(self, bytes_per_token):
                load_seconds = bytes_per_token / self.load_bytes_per_second
                compute_seconds = 1 / self.tokens_per_second
                return compute_seconds > load_seconds

    class right_compares_speeds:
        """Compare tokens a second, of a load and of a prefill."""

        class CostModel:
            def prefers_load(self, bytes_per_token):
                return self.load_bytes_per_second / bytes_per_token > self.tokens_per_second

    class right_compares_bytes:
        """Compare the bytes that a load moves while one token is computed."""

        class CostModel:
            def prefers_load(self, bytes_per_token):
                return bytes_per_token * self.tokens_per_second < self.load_bytes_per_second

    class wrong_prefers_the_slower_one:
        """Mistake speeds for times."""

        red = "with 999 bytes, loading is faster"
        unseen = "play always loads, and asks no cost model"

        class CostModel:
            def prefers_load(self, bytes_per_token):
                return self.load_bytes_per_second / bytes_per_token < self.tokens_per_second

    class wrong_pays_for_the_store:
        """Add the time of the store, which has been paid for."""

        red = "with 999 bytes, loading is faster"
        unseen = "play always loads, and asks no cost model"

        class CostModel:
            def prefers_load(self, bytes_per_token):
                seconds = bytes_per_token / self.load_bytes_per_second + bytes_per_token / self.store_bytes_per_second
                return seconds < 1 / self.tokens_per_second

    class wrong_loads_always:
        """Forget to ask how fast tokens are computed."""

        red = "with 1,001 bytes, computing is faster"
        unseen = "play always loads, and asks no cost model"

        class CostModel:
            def prefers_load(self, bytes_per_token):
                return True
