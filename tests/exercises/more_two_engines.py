"""Solutions and mistakes for the steps of the branch more_two_engines."""


class Step1:
    class right_looks_once_for_work:
        """Ask for the work first, and name the parts of a message."""

        class HostTier:
            def receive(self, data, block_hash):
                self._put(data, block_hash, block=None)

        class LLMEngine:
            def _receive(self):
                has_work = self.scheduler.running or self.scheduler.waiting or self._ended
                try:
                    message = self.prefill.receive(not has_work and len(self._unqueued) > 0)
                except (EOFError, OSError):
                    self.close()
                    return
                if message is None:
                    return
                for place in range(len(message.hashes)):
                    self.host_tier.receive(message.blocks[place], message.hashes[place])
                if message.request_id is not None:
                    self._queue(message.request_id)

    class right_stores_a_block_itself:
        """Write to the host's pool without _put."""

        class HostTier:
            def receive(self, data, block_hash):
                if block_hash in self:
                    self.release(self.hold([block_hash]))
                elif len(self.pool.free) > 0:
                    blocks = self.pool.get_new_blocks(1)
                    self.blocks[blocks[0]] = data
                    self.pool.cache_block(blocks[0], block_hash)
                    self.pool.free_blocks(blocks)

    class wrong_forgets_to_free:
        """Keep a holder on each block that has come."""

        red = "A block that is received twice is stored once and renewed"

        class HostTier:
            def receive(self, data, block_hash):
                if block_hash not in self and self.pool.free:
                    [target] = self.pool.get_new_blocks(1)
                    self.blocks[target].copy_(data)
                    self.pool.cache_block(target, block_hash)

    class wrong_does_not_renew:
        """Do nothing with a block that is there."""

        red = "d must evict b"

        class HostTier:
            def receive(self, data, block_hash):
                if block_hash not in self:
                    self._put(data, block_hash, None)

    class wrong_takes_all_messages:
        """Receive until there is nothing more."""

        red = "A step receives one message"

        class LLMEngine:
            def _receive(self):
                while message := self.prefill.receive(False):
                    for block_hash, block in zip(message.hashes, message.blocks, strict=True):
                        self.host_tier.receive(block, block_hash)
                    self._queue(message.request_id)

    class wrong_always_waits:
        """Wait for the next message in each step."""

        red = "the engine waits for a message, and has asked for nothing"

        class LLMEngine:
            def _receive(self):
                message = self.prefill.receive(wait=True)
                for block_hash, block in zip(message.hashes, message.blocks, strict=True):
                    self.host_tier.receive(block, block_hash)
                self._queue(message.request_id)


class Step2:
    class right_collects_the_parts_first:
        """Cut the hashes into parts, and add an empty one if there are none."""

        def serve(engine, commands, results):
            pool, wanted = engine.kv_cache_manager.pool, {}
            while True:
                while True:
                    if wanted and commands.empty():
                        break
                    request_id, token_ids, hashes = commands.get()
                    if not token_ids:
                        if request_id in wanted:
                            engine.abort_request(request_id)
                            wanted.pop(request_id)
                        continue
                    params = SamplingParams(max_tokens=1, seed=0)
                    engine.add_request(request_id, token_ids, params)
                    wanted[request_id] = hashes
                for output in engine.step():
                    hashes = [each for each in wanted.pop(output.request_id)[::-1] if each in pool.cached]
                    parts = [hashes[start : start + NUM_BLOCKS] for start in range(0, len(hashes), NUM_BLOCKS)] or [[]]
                    for number, part in enumerate(parts, start=1):
                        blocks = engine.kv_cache.blocks[[pool.cached[each] for each in part]].cpu()
                        name = output.request_id if number == len(parts) else None
                        results.send_bytes(pickle.dumps(Prefilled(part, blocks, name)))

    class right_takes_the_last_ones_off:
        """Take hashes off the end until none is left."""

        def serve(engine, commands, results):
            cached, wanted = engine.kv_cache_manager.pool.cached, {}
            while True:
                while not (wanted and commands.empty()):
                    request_id, token_ids, hashes = commands.get()
                    if token_ids:
                        engine.add_request(request_id, token_ids, SamplingParams(temperature=0.0, max_tokens=1))
                        wanted[request_id] = hashes
                    elif wanted.pop(request_id, None):
                        engine.abort_request(request_id)
                for output in engine.step():
                    left = [each for each in wanted.pop(output.request_id) if each in cached]
                    request_id = None
                    while request_id is None:
                        part, left = left[-NUM_BLOCKS:][::-1], left[:-NUM_BLOCKS]
                        request_id = None if left else output.request_id
                        blocks = engine.kv_cache.blocks[[cached[each] for each in part]].cpu()
                        results.send_bytes(pickle.dumps(Prefilled(part, blocks, request_id)))

    class wrong_sends_the_beginning_first:
        """Send the blocks in their order."""

        red = "ten blocks are wanted, and the last one is sent first"

        def serve(engine, commands, results):
            cached, wanted = engine.kv_cache_manager.pool.cached, {}
            while True:
                while not wanted or not commands.empty():
                    request_id, token_ids, hashes = commands.get()
                    if token_ids:
                        wanted[request_id] = hashes
                        engine.add_request(request_id, token_ids, SamplingParams(temperature=0.0, max_tokens=1))
                    elif engine.abort_request(request_id):
                        del wanted[request_id]
                for output in engine.step():
                    hashes = [each for each in wanted.pop(output.request_id) if each in cached]
                    for start in range(0, max(len(hashes), 1), NUM_BLOCKS):
                        part = hashes[start : start + NUM_BLOCKS]
                        blocks = engine.kv_cache.blocks[[cached[each] for each in part]].cpu()
                        request_id = None if start + NUM_BLOCKS < len(hashes) else output.request_id
                        results.send_bytes(pickle.dumps(Prefilled(part, blocks, request_id)))

    class wrong_is_silent_without_blocks:
        """Send nothing if there is no block to send, so that the request waits forever."""

        red = "A prompt that cannot be computed is answered without blocks"

        def serve(engine, commands, results):
            cached, wanted = engine.kv_cache_manager.pool.cached, {}
            while True:
                while not wanted or not commands.empty():
                    request_id, token_ids, hashes = commands.get()
                    if token_ids:
                        wanted[request_id] = hashes
                        engine.add_request(request_id, token_ids, SamplingParams(temperature=0.0, max_tokens=1))
                    elif engine.abort_request(request_id):
                        del wanted[request_id]
                for output in engine.step():
                    hashes = [each for each in reversed(wanted.pop(output.request_id)) if each in cached]
                    for start in range(0, len(hashes), NUM_BLOCKS):
                        part = hashes[start : start + NUM_BLOCKS]
                        blocks = engine.kv_cache.blocks[[cached[each] for each in part]].cpu()
                        request_id = None if start + NUM_BLOCKS < len(hashes) else output.request_id
                        results.send_bytes(pickle.dumps(Prefilled(part, blocks, request_id)))

    class wrong_reads_one_command_a_step:
        """Finish a prompt before the next command is read, so that no abort is heard in time."""

        red = "both prompts fit into one step"

        def serve(engine, commands, results):
            cached, wanted = engine.kv_cache_manager.pool.cached, {}
            while True:
                while not wanted:
                    request_id, token_ids, hashes = commands.get()
                    if token_ids:
                        wanted[request_id] = hashes
                        engine.add_request(request_id, token_ids, SamplingParams(temperature=0.0, max_tokens=1))
                for output in engine.step():
                    hashes = [each for each in reversed(wanted.pop(output.request_id)) if each in cached]
                    for start in range(0, max(len(hashes), 1), NUM_BLOCKS):
                        part = hashes[start : start + NUM_BLOCKS]
                        blocks = engine.kv_cache.blocks[[cached[each] for each in part]].cpu()
                        request_id = None if start + NUM_BLOCKS < len(hashes) else output.request_id
                        results.send_bytes(pickle.dumps(Prefilled(part, blocks, request_id)))

    class wrong_sends_everything:
        """Send all blocks of the prompt, whatever is wanted."""

        red = "Only wanted blocks are sent"

        def serve(engine, commands, results):
            cached, wanted = engine.kv_cache_manager.pool.cached, {}
            while True:
                while not wanted or not commands.empty():
                    request_id, token_ids, hashes = commands.get()
                    if token_ids:
                        wanted[request_id] = token_ids
                        engine.add_request(request_id, token_ids, SamplingParams(temperature=0.0, max_tokens=1))
                    elif engine.abort_request(request_id):
                        del wanted[request_id]
                for output in engine.step():
                    [seq] = engine.input_processor.process("", wanted.pop(output.request_id), SamplingParams())
                    engine.kv_cache_manager.find_hits(seq)
                    last = (seq.num_tokens - 1) // engine.config.block_size
                    hashes = [each for each in reversed(seq.block_hashes[:last]) if each in cached]
                    for start in range(0, max(len(hashes), 1), NUM_BLOCKS):
                        part = hashes[start : start + NUM_BLOCKS]
                        blocks = engine.kv_cache.blocks[[cached[each] for each in part]].cpu()
                        request_id = None if start + NUM_BLOCKS < len(hashes) else output.request_id
                        results.send_bytes(pickle.dumps(Prefilled(part, blocks, request_id)))


class Step3:
    class right_queues_first:
        """Decide who computes the prompt in one place, with names for the reasons."""

        class LLMEngine:
            def add_request(self, request_id, prompt, params=None):
                if request_id in self._requests:
                    raise ValueError(f"request {request_id} has not finished: its id is in use")
                samples = self.input_processor.process(request_id, prompt, params or SamplingParams())
                self._requests[request_id] = samples
                if samples[0].finished:
                    self._ended.append(samples[0])
                    self.observer.tell("refuse", request_id, samples[0].error)
                    return
                size, first = self.config.max_num_seqs, samples[0]
                has_room = len(self._unqueued) < size
                for start in range(0, len(samples), size):
                    samples[start].to_fork = samples[start + 1 : start + size]
                self._unqueued[request_id] = samples[::size]
                if self.prefill is None or not has_room:
                    return self._queue(request_id)
                hits = self.kv_cache_manager.find_hits(first)
                last = (first.num_tokens - 1) // self.config.block_size
                if len(hits) == last:
                    return self._queue(request_id)
                self.prefill.send(request_id, first.prompt_token_ids, first.block_hashes[len(hits) : last])

    class right_aborts_by_key:
        """Look for the request before it is removed."""

        class LLMEngine:
            def abort_request(self, request_id):
                if request_id not in self._requests:
                    return None
                self.observer.tell("abort", request_id)
                samples = self._requests.pop(request_id)
                for seq in samples:
                    if not seq.finished:
                        seq.finish("abort")
                        self.scheduler.remove(seq)
                self._ended = [seq for seq in self._ended if seq not in samples]
                if request_id in self._unqueued:
                    self.prefill.abort(request_id)
                    del self._unqueued[request_id]
                return request_output(samples)

    class wrong_sends_every_prompt:
        """Send prompts that have nothing to ask for, too."""

        red = "asks for no block"

        class LLMEngine:
            def add_request(self, request_id, prompt, params=None):
                if request_id in self._requests:
                    raise ValueError(f"request {request_id} has not finished: its id is in use")
                samples = self.input_processor.process(request_id, prompt, params or SamplingParams())
                self._requests[request_id] = samples
                if samples[0].finished:
                    self._ended.append(samples[0])
                    self.observer.tell("refuse", request_id, samples[0].error)
                    return
                size = self.config.max_num_seqs
                for first, *others in (samples[start : start + size] for start in range(0, len(samples), size)):
                    first.to_fork = others
                self._unqueued[request_id] = samples[::size]
                num_hits = len(self.kv_cache_manager.find_hits(samples[0]))
                missing = samples[0].block_hashes[num_hits : (samples[0].num_tokens - 1) // self.config.block_size]
                if self.prefill and len(self._unqueued) <= size:
                    self.prefill.send(request_id, samples[0].prompt_token_ids, missing)
                else:
                    self._queue(request_id)

    class wrong_has_no_limit:
        """Send as many prompts as come."""

        red = "A prompt is computed here if the other engine has enough"

        class LLMEngine:
            def add_request(self, request_id, prompt, params=None):
                if request_id in self._requests:
                    raise ValueError(f"request {request_id} has not finished: its id is in use")
                samples = self.input_processor.process(request_id, prompt, params or SamplingParams())
                self._requests[request_id] = samples
                if samples[0].finished:
                    self._ended.append(samples[0])
                    self.observer.tell("refuse", request_id, samples[0].error)
                    return
                size = self.config.max_num_seqs
                for first, *others in (samples[start : start + size] for start in range(0, len(samples), size)):
                    first.to_fork = others
                self._unqueued[request_id] = samples[::size]
                num_hits = len(self.kv_cache_manager.find_hits(samples[0]))
                missing = samples[0].block_hashes[num_hits : (samples[0].num_tokens - 1) // self.config.block_size]
                if self.prefill and missing:
                    self.prefill.send(request_id, samples[0].prompt_token_ids, missing)
                else:
                    self._queue(request_id)

    class wrong_asks_for_the_last_block_too:
        """Ask for all full blocks, with the one of the last token."""

        red = "A prompt without a block that can be hit is queued at once"

        class LLMEngine:
            def add_request(self, request_id, prompt, params=None):
                if request_id in self._requests:
                    raise ValueError(f"request {request_id} has not finished: its id is in use")
                samples = self.input_processor.process(request_id, prompt, params or SamplingParams())
                self._requests[request_id] = samples
                if samples[0].finished:
                    self._ended.append(samples[0])
                    self.observer.tell("refuse", request_id, samples[0].error)
                    return
                size = self.config.max_num_seqs
                for first, *others in (samples[start : start + size] for start in range(0, len(samples), size)):
                    first.to_fork = others
                self._unqueued[request_id] = samples[::size]
                missing = samples[0].block_hashes[len(self.kv_cache_manager.find_hits(samples[0])) :]
                if self.prefill and missing and len(self._unqueued) <= size:
                    self.prefill.send(request_id, samples[0].prompt_token_ids, missing)
                else:
                    self._queue(request_id)

    class wrong_lets_the_other_engine_compute_for_nobody:
        """Abort here, and tell nobody."""

        red = "An abort reaches the other engine"

        class LLMEngine:
            def abort_request(self, request_id):
                if request_id not in self._requests:
                    return None
                self._unqueued.pop(request_id, None)
                self.observer.tell("abort", request_id)
                samples = self._requests.pop(request_id)
                for seq in samples:
                    if not seq.finished:
                        seq.finish("abort")
                        self.scheduler.remove(seq)
                self._ended = [seq for seq in self._ended if seq not in samples]
                return request_output(samples)


class Step4:
    class right_takes_the_requests_out_first:
        """Queue the sequences, and forget the requests at once."""

        class LLMEngine:
            def close(self):
                prefill, self.prefill = self.prefill, None
                if prefill is not None:
                    prefill.close()
                for firsts in self._unqueued.values():
                    for first in firsts:
                        self.scheduler.add(first)
                self._unqueued.clear()

    class right_takes_one_after_the_other:
        """Queue the oldest request until there is none."""

        class LLMEngine:
            def close(self):
                while self._unqueued:
                    self._queue(next(iter(self._unqueued)))
                if self.prefill:
                    self.prefill.close()
                self.prefill = None

    class wrong_loses_the_requests:
        """End the process, and let its requests wait."""

        red = "nothing runs, and requests are unfinished"

        class LLMEngine:
            def close(self):
                if self.prefill:
                    self.prefill.close()
                    self.prefill = None
                self._unqueued.clear()

    class wrong_leaves_the_process:
        """Queue the requests, and forget the process."""

        red = "Requests of a dead process are computed here"

        class LLMEngine:
            def close(self):
                self.prefill = None
                for request_id in list(self._unqueued):
                    self._queue(request_id)

    class wrong_queues_the_newest_first:
        """Take the requests from the end."""

        red = "not in order of arrival"

        class LLMEngine:
            def close(self):
                if self.prefill:
                    self.prefill.close()
                    self.prefill = None
                for request_id in reversed(list(self._unqueued)):
                    self._queue(request_id)
