"""Solutions and mistakes for the steps of stage 4."""


class Step1:
    class right_walks_a_copy_of_running:
        """Skip the sequences that were preempted on the way."""

        class Scheduler:
            def schedule(self):
                output = SchedulerOutput(budget=self._max_num_batched_tokens)
                manager, num_preemptions = self._kv_cache_manager, self.num_preemptions
                for seq in list(self.running):
                    if seq.num_uncomputed_tokens > 1 or output.budget == 0:
                        continue
                    while seq in self.running and not manager.can_append(seq):
                        if len(self.running) == 1:
                            self._fail(seq, output)
                        else:
                            self._preempt(self.running[-1], makes_room_for=seq)
                    if seq in self.running:
                        self._take(seq, output)
                for seq in self.running:
                    if seq.num_uncomputed_tokens > 1 and output.budget:
                        self._take(seq, output)
                if self.num_preemptions == num_preemptions:
                    while self.waiting and output.budget:
                        seq = self.waiting[0]
                        if cdiv(seq.num_tokens, manager.block_size) > manager.num_blocks:
                            self._fail(seq, output)
                        elif self._may_admit(seq):
                            manager.allocate(seq)
                            self.running.append(self.waiting.popleft())
                            self._take(seq, output)
                        else:
                            break
                self._observer.tell("schedule", output)
                return output

    class right_plans_first_and_keeps_its_own_budget:
        """Build the output at the end, prompts before decodes, without _take()."""

        class Scheduler:
            def schedule(self):
                manager, left, has_preempted = self._kv_cache_manager, self._max_num_batched_tokens, False
                failed = SchedulerOutput(budget=0)
                decodes, prompts = [], []
                position = 0
                while position < len(self.running) and left:
                    seq = self.running[position]
                    if seq.num_uncomputed_tokens == 1:
                        if not manager.can_append(seq):
                            if seq is self.running[0] is self.running[-1]:
                                self._fail(seq, failed)
                            else:
                                self._preempt(self.running[-1], seq)
                                has_preempted = True
                            continue
                        manager.append_slot(seq)
                        decodes.append((seq, 1))
                        left -= 1
                    position += 1
                for seq in self.running:
                    num_tokens = min(left, seq.num_uncomputed_tokens)
                    if seq.num_uncomputed_tokens > 1 and num_tokens:
                        prompts.append((seq, num_tokens))
                        left -= num_tokens
                while left and self.waiting and not has_preempted:
                    seq = self.waiting[0]
                    if seq.num_tokens > manager.num_blocks * manager.block_size:
                        self._fail(seq, failed)
                        continue
                    if not self._may_admit(seq):
                        break
                    self.waiting.popleft()
                    manager.allocate(seq)
                    self.running.append(seq)
                    prompts.append((seq, min(left, seq.num_tokens)))
                    left -= prompts[-1][1]
                output = SchedulerOutput(budget=left, batch=prompts + decodes, failed=failed.failed)
                self._observer.tell("schedule", output)
                return output

    class right_splits_running_in_two:
        """Sort the running sequences into decodes and prompts before any token is given out."""

        class Scheduler:
            def schedule(self):
                output = SchedulerOutput(budget=self._max_num_batched_tokens)
                before = self.num_preemptions
                decodes = [seq for seq in self.running if seq.num_uncomputed_tokens == 1]
                while decodes and output.budget > 0:
                    seq = decodes.pop(0)
                    while not self._kv_cache_manager.can_append(seq) and len(self.running) > 1:
                        newest = self.running[-1]
                        self._preempt(newest, seq)
                        if newest in decodes:
                            decodes.remove(newest)
                        if newest is seq:
                            break
                    if seq not in self.running:
                        continue
                    if self._kv_cache_manager.can_append(seq):
                        self._take(seq, output)
                    else:
                        self._fail(seq, output)
                for seq in [seq for seq in self.running if seq.num_uncomputed_tokens > 1]:
                    if output.budget > 0:
                        self._take(seq, output)
                while output.budget > 0 and self.waiting and self.num_preemptions == before:
                    seq = self.waiting[0]
                    if self._kv_cache_manager.num_needed(seq) > self._kv_cache_manager.num_blocks:
                        self._fail(seq, output)
                    elif not self._may_admit(seq):
                        break
                    else:
                        self.running.append(self.waiting.popleft())
                        self._kv_cache_manager.allocate(seq)
                        self._take(seq, output)
                self._observer.tell("schedule", output)
                return output

    class wrong_serves_running_in_one_pass:
        """A prompt that came first takes the tokens of the sequences that decode."""

        red = "Decodes come before"

        class Scheduler:
            def schedule(self):
                output = SchedulerOutput(budget=self._max_num_batched_tokens)
                for seq in self.running:
                    if output.budget > 0:
                        self._take(seq, output)
                return output

    class wrong_gives_the_whole_budget_to_each_prompt:
        """The budget is read once and never spent."""

        red = "The oldest prompt gets"

        class Scheduler:
            def schedule(self):
                output = SchedulerOutput(budget=self._max_num_batched_tokens)
                decodes = [seq for seq in self.running if seq.num_uncomputed_tokens == 1][: output.budget]
                for seq in decodes:
                    self._kv_cache_manager.append_slot(seq)
                    output.batch.append((seq, 1))
                left = output.budget - len(decodes)
                for seq in self.running:
                    if seq.num_uncomputed_tokens > 1 and left > 0:
                        output.batch.append((seq, min(seq.num_uncomputed_tokens, left)))
                return output

    class wrong_forgets_the_budget_of_decodes:
        """More sequences decode than the step has room for."""

        red = "A budget smaller than"

        class Scheduler:
            def schedule(self):
                output = SchedulerOutput(budget=self._max_num_batched_tokens)
                for seq in self.running:
                    if seq.num_uncomputed_tokens == 1:
                        self._kv_cache_manager.append_slot(seq)
                        output.batch.append((seq, 1))
                        output.budget -= 1
                for seq in self.running:
                    if seq.num_uncomputed_tokens > 1 and output.budget > 0:
                        self._take(seq, output)
                return output

    class wrong_takes_no_block:
        """The new token of a sequence whose blocks are full has no slot."""

        red = "a's fifth token needs"

        class Scheduler:
            def schedule(self):
                output = SchedulerOutput(budget=self._max_num_batched_tokens)
                for is_decode in (True, False):
                    for seq in self.running:
                        num_tokens = min(seq.num_uncomputed_tokens, output.budget)
                        if (seq.num_uncomputed_tokens == 1) == is_decode and num_tokens:
                            output.batch.append((seq, num_tokens))
                            output.budget -= num_tokens
                return output

    class wrong_tells_nothing:
        """The observer never hears of the step."""

        red = 'schedule() ends with tell("schedule", output)'

        class Scheduler:
            def schedule(self):
                output = SchedulerOutput(budget=self._max_num_batched_tokens)
                for is_prompt in (False, True):
                    for seq in self.running:
                        if (seq.num_uncomputed_tokens > 1) == is_prompt and output.budget > 0:
                            self._take(seq, output)
                return output


class Step2:
    class right_looks_at_what_would_be_left:
        """A seat, and after the allocation the watermark is still free."""

        class Scheduler:
            def _may_admit(self, seq):
                manager = self._kv_cache_manager
                has_seat = len(self.running) < self._max_num_seqs
                left = manager.num_free_blocks - manager.num_needed(seq)
                has_blocks = left >= self._watermark_blocks or (left >= 0 and not self.running)
                if not has_seat:
                    self._observer.tell("wait", seq, "seat", 1, 0)
                elif not has_blocks:
                    needed = manager.num_needed(seq) + (self._watermark_blocks if self.running else 0)
                    self._observer.tell("wait", seq, "blocks", needed, manager.num_free_blocks)
                return has_seat and has_blocks

    class right_returns_early:
        """One question at a time; count the sequence's blocks without num_needed()."""

        class Scheduler:
            def _may_admit(self, seq):
                if len(self.running) >= self._max_num_seqs:
                    self._observer.tell("wait", seq, "seat", 1, 0)
                    return False
                free = self._kv_cache_manager.num_free_blocks
                needed = cdiv(seq.num_tokens, self._kv_cache_manager.block_size)
                if self.running:
                    needed += self._watermark_blocks
                if needed <= free:
                    return True
                self._observer.tell("wait", seq, "blocks", needed, free)
                return False

    class wrong_admits_without_a_seat:
        """max_num_seqs is never looked at."""

        red = "No more than max num seqs run"

        class Scheduler:
            def _may_admit(self, seq):
                spare = self._watermark_blocks if self.running else 0
                return self._kv_cache_manager.num_needed(seq) + spare <= self._kv_cache_manager.num_free_blocks

    class wrong_promises_blocks:
        """Stage 2's rule: there must be room for all that the request may ever need."""

        red = "tokens it has"

        class Scheduler:
            def _may_admit(self, seq):
                if len(self.running) == self._max_num_seqs:
                    return False
                spare = self._watermark_blocks if self.running else 0
                needed = cdiv(seq.max_num_tokens, self._kv_cache_manager.block_size) + spare
                return needed <= self._kv_cache_manager.num_free_blocks or not self.running

    class wrong_fills_the_pool_beside_others:
        """The watermark is forgotten."""

        red = "leaves the watermark free"

        class Scheduler:
            def _may_admit(self, seq):
                manager = self._kv_cache_manager
                return len(self.running) < self._max_num_seqs and manager.num_needed(seq) <= manager.num_free_blocks

    class wrong_keeps_the_watermark_from_the_first:
        """A request that runs alone leaves blocks free for others that are not there."""

        red = "runs alone"

        class Scheduler:
            def _may_admit(self, seq):
                needed = self._kv_cache_manager.num_needed(seq) + self._watermark_blocks
                return len(self.running) < self._max_num_seqs and needed <= self._kv_cache_manager.num_free_blocks

    class wrong_lets_a_small_request_overtake:
        """schedule() goes on to the next request when the first one does not fit."""

        red = "A small request does not overtake"

        class Scheduler:
            def schedule(self):
                output = SchedulerOutput(budget=self._max_num_batched_tokens)
                num_preemptions, index = self.num_preemptions, 0
                while index < len(self.running) and output.budget > 0:
                    seq = self.running[index]
                    if seq.num_uncomputed_tokens > 1:
                        index += 1
                    elif self._kv_cache_manager.can_append(seq):
                        self._take(seq, output)
                        index += 1
                    elif len(self.running) > 1:
                        self._preempt(self.running[-1], makes_room_for=seq)
                    else:
                        self._fail(seq, output)
                for seq in self.running:
                    if seq.num_uncomputed_tokens > 1 and output.budget > 0:
                        self._take(seq, output)
                for seq in list(self.waiting):
                    if cdiv(seq.num_tokens, self._kv_cache_manager.block_size) > self._kv_cache_manager.num_blocks:
                        self._fail(seq, output)
                    elif num_preemptions == self.num_preemptions and output.budget > 0 and self._may_admit(seq):
                        self.waiting.remove(seq)
                        self.running.append(seq)
                        self._kv_cache_manager.allocate(seq)
                        self._take(seq, output)
                self._observer.tell("schedule", output)
                return output

    class wrong_admits_without_a_budget:
        """The third pass does not look at the budget."""

        red = "A step without budget left"

        class Scheduler:
            def schedule(self):
                output = SchedulerOutput(budget=self._max_num_batched_tokens)
                num_preemptions, index = self.num_preemptions, 0
                while index < len(self.running) and output.budget > 0:
                    seq = self.running[index]
                    if seq.num_uncomputed_tokens > 1:
                        index += 1
                    elif self._kv_cache_manager.can_append(seq):
                        self._take(seq, output)
                        index += 1
                    elif len(self.running) > 1:
                        self._preempt(self.running[-1], makes_room_for=seq)
                    else:
                        self._fail(seq, output)
                for seq in self.running:
                    if seq.num_uncomputed_tokens > 1 and output.budget > 0:
                        self._take(seq, output)
                while self.waiting and num_preemptions == self.num_preemptions:
                    seq = self.waiting[0]
                    if cdiv(seq.num_tokens, self._kv_cache_manager.block_size) > self._kv_cache_manager.num_blocks:
                        self._fail(seq, output)
                        continue
                    if not self._may_admit(seq):
                        break
                    self.running.append(self.waiting.popleft())
                    self._kv_cache_manager.allocate(seq)
                    if output.budget > 0:
                        self._take(seq, output)
                self._observer.tell("schedule", output)
                return output

    class wrong_waits_for_blocks_that_the_pool_does_not_have:
        """A prompt larger than the pool holds up all others forever."""

        red = "a needs 5 blocks of 4"

        class Scheduler:
            def schedule(self):
                output = SchedulerOutput(budget=self._max_num_batched_tokens)
                num_preemptions, index = self.num_preemptions, 0
                while index < len(self.running) and output.budget > 0:
                    seq = self.running[index]
                    if seq.num_uncomputed_tokens > 1:
                        index += 1
                    elif self._kv_cache_manager.can_append(seq):
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
                    if not self._may_admit(seq):
                        break
                    self.running.append(self.waiting.popleft())
                    self._kv_cache_manager.allocate(seq)
                    self._take(seq, output)
                self._observer.tell("schedule", output)
                return output

    class wrong_tells_of_blocks_without_the_watermark:
        """The blocks that must stay free are not counted as needed."""

        red = "the watermark's 2 are needed"
        unseen = "play does not compare why a request waits"

        class Scheduler:
            def _may_admit(self, seq):
                if len(self.running) == self._max_num_seqs:
                    self._observer.tell("wait", seq, "seat", 1, 0)
                    return False
                needed, free = self._kv_cache_manager.num_needed(seq), self._kv_cache_manager.num_free_blocks
                if needed + (self._watermark_blocks if self.running else 0) <= free:
                    return True
                self._observer.tell("wait", seq, "blocks", needed, free)
                return False

    class wrong_tells_nothing_of_seats:
        """The observer hears of missing blocks alone."""

        red = "one seat is needed"
        unseen = "play does not compare why a request waits"

        class Scheduler:
            def _may_admit(self, seq):
                spare = self._watermark_blocks if self.running else 0
                needed, free = self._kv_cache_manager.num_needed(seq) + spare, self._kv_cache_manager.num_free_blocks
                if needed > free:
                    self._observer.tell("wait", seq, "blocks", needed, free)
                return needed <= free and len(self.running) < self._max_num_seqs


class Step3:
    class right_goes_on_to_admit_after_a_preemption:
        """The first in line has just lost its blocks: it does not fit, and holds up the others anyway."""

        class Scheduler:
            def schedule(self):
                output = SchedulerOutput(budget=self._max_num_batched_tokens)
                index = 0
                while index < len(self.running) and output.budget > 0:
                    seq = self.running[index]
                    if seq.num_uncomputed_tokens > 1:
                        index += 1
                    elif self._kv_cache_manager.can_append(seq):
                        self._take(seq, output)
                        index += 1
                    elif len(self.running) > 1:
                        self._preempt(self.running[-1], makes_room_for=seq)
                    else:
                        self._fail(seq, output)
                for seq in self.running:
                    if seq.num_uncomputed_tokens > 1 and output.budget > 0:
                        self._take(seq, output)
                while self.waiting and output.budget > 0:
                    seq = self.waiting[0]
                    if cdiv(seq.num_tokens, self._kv_cache_manager.block_size) > self._kv_cache_manager.num_blocks:
                        self._fail(seq, output)
                    elif self._may_admit(seq):
                        self.running.append(self.waiting.popleft())
                        self._kv_cache_manager.allocate(seq)
                        self._take(seq, output)
                    else:
                        break
                self._observer.tell("schedule", output)
                return output

    class right_pops_and_inserts:
        """The sequence is the last of running; the front of waiting is index 0."""

        class Scheduler:
            def _preempt(self, seq, makes_room_for):
                self.num_preemptions += 1
                self.waiting.insert(0, self.running.pop())
                self._kv_cache_manager.free(seq)
                self._observer.tell("preempt", seq, makes_room_for)

    class right_builds_new_queues:
        """Keep all but the sequence, and put it before all that wait."""

        class Scheduler:
            def _preempt(self, seq, makes_room_for):
                self._kv_cache_manager.free(seq)
                self.running[:] = [other for other in self.running if other is not seq]
                self.waiting.extendleft([seq])
                self.num_preemptions = self.num_preemptions + 1
                self._observer.tell("preempt", seq, makes_room_for)

    class wrong_waits_at_the_end:
        """The sequence loses its place to requests that came later."""

        red = "not in order of arrival"

        class Scheduler:
            def _preempt(self, seq, makes_room_for):
                self.running.remove(seq)
                self._kv_cache_manager.free(seq)
                self.waiting.append(seq)
                self.num_preemptions += 1
                self._observer.tell("preempt", seq, makes_room_for)

    class wrong_counts_nothing:
        """schedule() does not notice that the step has preempted."""

        red = "num_preemptions is 0"
        unseen = "the count is in no event, and the first in line has just lost its blocks: it does not fit"

        class Scheduler:
            def _preempt(self, seq, makes_room_for):
                self.running.remove(seq)
                self._kv_cache_manager.free(seq)
                self.waiting.appendleft(seq)
                self._observer.tell("preempt", seq, makes_room_for)

    class wrong_leaves_tokens_computed:
        """The blocks are gone, and the sequence still believes that its tokens are in them."""

        red = "count as computed"

        class Scheduler:
            def _preempt(self, seq, makes_room_for):
                self.running.remove(seq)
                num_computed_tokens = seq.num_computed_tokens
                self._kv_cache_manager.free(seq)
                seq.num_computed_tokens = num_computed_tokens
                self.waiting.appendleft(seq)
                self.num_preemptions += 1
                self._observer.tell("preempt", seq, makes_room_for)

    class wrong_forgets_the_output:
        """The sequence begins anew with its prompt alone."""

        red = "b comes back with 7 tokens of prompt and 2 of output"

        class Scheduler:
            def _preempt(self, seq, makes_room_for):
                self.running.remove(seq)
                self._kv_cache_manager.free(seq)
                del seq.token_ids[seq.num_prompt_tokens :]
                self.waiting.appendleft(seq)
                self.num_preemptions += 1
                self._observer.tell("preempt", seq, makes_room_for)

    class wrong_preempts_the_oldest:
        """The first of running makes room, and waits behind none."""

        red = "not in order of arrival: b c run, a wait"

        class Scheduler:
            def schedule(self):
                output = SchedulerOutput(budget=self._max_num_batched_tokens)
                num_preemptions = self.num_preemptions
                for seq in list(self.running):
                    if seq not in self.running or seq.num_uncomputed_tokens > 1 or output.budget == 0:
                        continue
                    while not self._kv_cache_manager.can_append(seq) and seq in self.running:
                        self._preempt(self.running[0], seq)
                    if seq in self.running:
                        self._take(seq, output)
                for seq in self.running:
                    if seq.num_uncomputed_tokens > 1 and output.budget > 0:
                        self._take(seq, output)
                while self.waiting and output.budget > 0 and num_preemptions == self.num_preemptions:
                    seq = self.waiting[0]
                    if not self._may_admit(seq):
                        break
                    self.running.append(self.waiting.popleft())
                    self._kv_cache_manager.allocate(seq)
                    self._take(seq, output)
                self._observer.tell("schedule", output)
                return output

    class wrong_tells_nothing:
        """The observer never hears of a preemption."""

        red = 'tell("preempt", seq, makes_room_for)'

        class Scheduler:
            def _preempt(self, seq, makes_room_for):
                self.running.remove(seq)
                self._kv_cache_manager.free(seq)
                self.waiting.appendleft(seq)
                self.num_preemptions += 1

    class wrong_never_fails_a_sequence_that_runs_alone:
        """A sequence that finds no block and no other one to preempt stays in running forever."""

        red = "fills the pool alone"

        class Scheduler:
            def schedule(self):
                output = SchedulerOutput(budget=self._max_num_batched_tokens)
                num_preemptions, index = self.num_preemptions, 0
                while index < len(self.running) and output.budget > 0:
                    seq = self.running[index]
                    if seq.num_uncomputed_tokens > 1:
                        index += 1
                    elif self._kv_cache_manager.can_append(seq):
                        self._take(seq, output)
                        index += 1
                    elif len(self.running) > 1:
                        self._preempt(self.running[-1], makes_room_for=seq)
                    else:
                        break
                for seq in self.running:
                    if seq.num_uncomputed_tokens > 1 and output.budget > 0:
                        self._take(seq, output)
                while self.waiting and output.budget > 0 and num_preemptions == self.num_preemptions:
                    seq = self.waiting[0]
                    if cdiv(seq.num_tokens, self._kv_cache_manager.block_size) > self._kv_cache_manager.num_blocks:
                        self._fail(seq, output)
                        continue
                    if not self._may_admit(seq):
                        break
                    self.running.append(self.waiting.popleft())
                    self._kv_cache_manager.allocate(seq)
                    self._take(seq, output)
                self._observer.tell("schedule", output)
                return output
