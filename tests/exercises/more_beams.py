"""Solutions and mistakes for the steps of the branch more_beams."""


class Step1:
    class right_copies_one_at_a_time:
        """Make each copy at once: the next beam writes to another block."""

        class BeamSearch:
            def append_slots(self, beams):
                for beam in beams:
                    if not self._kv_cache_manager.can_append(beam):
                        raise PoolTooSmall("no block is free for a beam")
                    block_copy = self._kv_cache_manager.append_slot(beam)
                    if block_copy is not None:
                        self._engine.kv_cache.copy_blocks([block_copy])

    class right_keeps_copies_only:
        """Keep a copy only if there is one, and count the beams."""

        class BeamSearch:
            def append_slots(self, beams):
                manager, copies = self._kv_cache_manager, []
                for number, beam in enumerate(beams):
                    if manager.can_append(beam):
                        if each := manager.append_slot(beam):
                            copies.append(each)
                    else:
                        raise PoolTooSmall(f"beam {number} of {len(beams)} needs a block, and none is free")
                if copies:
                    self._engine.kv_cache.copy_blocks(copies)

    class wrong_forgets_the_copies:
        """The new block of a beam stays empty."""

        red = "a copy does not have the keys and values of the prompt"

        class BeamSearch:
            def append_slots(self, beams):
                for beam in beams:
                    if not self._kv_cache_manager.can_append(beam):
                        raise PoolTooSmall("no block is free for a beam")
                    self._kv_cache_manager.append_slot(beam)

    class wrong_copies_for_the_last_beam_only:
        """The list is made anew for each beam."""

        red = "a copy does not have the keys and values of the prompt"

        class BeamSearch:
            def append_slots(self, beams):
                copies = []
                for beam in beams:
                    if not self._kv_cache_manager.can_append(beam):
                        raise PoolTooSmall("no block is free for a beam")
                    copies = [self._kv_cache_manager.append_slot(beam)]
                self._engine.kv_cache.copy_blocks([each for each in copies if each])

    class wrong_asks_for_all_beams_first:
        """One free block is promised to every beam."""

        red = "The pool is too small if a beam finds no free block"

        class BeamSearch:
            def append_slots(self, beams):
                if not all(self._kv_cache_manager.can_append(beam) for beam in beams):
                    raise PoolTooSmall("no block is free for a beam")
                copies = [self._kv_cache_manager.append_slot(beam) for beam in beams]
                self._engine.kv_cache.copy_blocks([each for each in copies if each])

    class wrong_never_raises:
        """Leave the check to the pool."""

        red = "The pool is too small if a beam finds no free block"

        class BeamSearch:
            def append_slots(self, beams):
                copies = [self._kv_cache_manager.append_slot(beam) for beam in beams]
                self._engine.kv_cache.copy_blocks([each for each in copies if each])


class Step2:
    class right_compares_all_beams_in_one_row:
        """Add the beams' own logprobs, and take the best of one long row."""

        class BeamSearch:
            def extend(self, beams):
                self.append_slots(beams)
                own = torch.tensor([[beam.cumulative_logprob] for beam in beams])
                row = (own + self._next_logprobs(beams).cpu()).flatten()  # [num_beams * vocab_size]
                vocab_size = len(row) // len(beams)
                num_endings = len(beams[0].stop_token_ids)
                best = row.topk(min(len(row), self._params.beam_width * (2 + num_endings)))
                return [
                    Candidate(beams[index // vocab_size], index % vocab_size, logprob)
                    for index, logprob in zip(best.indices.tolist(), best.values.tolist(), strict=True)
                ]

    class right_sorts_everything:
        """Make a candidate of each token of each beam."""

        class BeamSearch:
            def extend(self, beams):
                self.append_slots(beams)
                candidates = []
                for beam, row in zip(beams, self._next_logprobs(beams).tolist(), strict=True):
                    for token_id, logprob in enumerate(row):
                        candidates.append(Candidate(beam, token_id, logprob + beam.cumulative_logprob))
                candidates.sort(key=lambda candidate: candidate.logprob, reverse=True)
                return candidates

    class wrong_forgets_the_beam_itself:
        """Compare the last tokens alone."""

        red = "by the logprob of the whole output"

        class BeamSearch:
            def extend(self, beams):
                self.append_slots(beams)
                count = self._params.beam_width * max(2, 1 + len(beams[0].stop_token_ids))
                top = self._next_logprobs(beams).topk(count)
                candidates = [
                    Candidate(beam, token_id, logprob)
                    for beam, token_ids, values in zip(beams, top.indices.tolist(), top.values.tolist(), strict=True)
                    for token_id, logprob in zip(token_ids, values, strict=True)
                ]
                return sorted(candidates, key=lambda candidate: -candidate.logprob)[:count]

    class wrong_goes_beam_by_beam:
        """The candidates of the first beam come first."""

        red = "by the logprob of the whole output"

        class BeamSearch:
            def extend(self, beams):
                self.append_slots(beams)
                count = self._params.beam_width * max(2, 1 + len(beams[0].stop_token_ids))
                top = self._next_logprobs(beams).topk(count)
                return [
                    Candidate(beam, token_id, beam.cumulative_logprob + logprob)
                    for beam, token_ids, values in zip(beams, top.indices.tolist(), top.values.tolist(), strict=True)
                    for token_id, logprob in zip(token_ids, values, strict=True)
                ]

    class wrong_writes_to_shared_blocks:
        """Compute without a slot for each beam."""

        red = "Candidates are the likeliest continuations of all beams"

        class BeamSearch:
            def extend(self, beams):
                logprobs = self._next_logprobs(beams)
                count = self._params.beam_width * max(2, 1 + len(beams[0].stop_token_ids))
                top = logprobs.topk(count)
                candidates = [
                    Candidate(beam, token_id, beam.cumulative_logprob + logprob)
                    for beam, token_ids, values in zip(beams, top.indices.tolist(), top.values.tolist(), strict=True)
                    for token_id, logprob in zip(token_ids, values, strict=True)
                ]
                return sorted(candidates, key=lambda candidate: -candidate.logprob)[:count]

    class wrong_takes_beam_width_of_each:
        """Take as many candidates as beams, whether they have ended or not."""

        red = "too few candidates can go on"

        class BeamSearch:
            def extend(self, beams):
                self.append_slots(beams)
                top = self._next_logprobs(beams).topk(2 * self._params.beam_width)
                candidates = [
                    Candidate(beam, token_id, beam.cumulative_logprob + logprob)
                    for beam, token_ids, values in zip(beams, top.indices.tolist(), top.values.tolist(), strict=True)
                    for token_id, logprob in zip(token_ids, values, strict=True)
                ]
                return sorted(candidates, key=lambda candidate: -candidate.logprob)


class Step3:
    class right_removes_the_worst:
        """Insert the new one before the first that is worse, and drop what is too much."""

        class Hypotheses:
            def add(self, token_ids, logprob):
                new = Hypothesis(self._score(logprob, len(token_ids)), token_ids, logprob)
                place = sum(each.score >= new.score for each in self.best)
                self.best.insert(place, new)
                del self.best[self._params.beam_width :]

            def are_final(self, logprob, num_tokens, max_tokens):
                if len(self.best) == self._params.beam_width:
                    match self._params.early_stopping:
                        case True:
                            return True
                        case False:
                            return self._score(logprob, num_tokens) <= self.best[-1].score
                        case _:
                            hopes = [self._score(logprob, length) for length in (num_tokens, max_tokens)]
                            return max(hopes) <= self.best[-1].score
                return False

    class right_replaces_the_worst:
        """Compare with the worst first."""

        class Hypotheses:
            def add(self, token_ids, logprob):
                score = self._score(logprob, len(token_ids))
                if len(self.best) == self._params.beam_width:
                    if score <= self.best[-1].score:
                        return
                    self.best.pop()
                self.best.append(Hypothesis(score, token_ids, logprob))
                self.best.sort(key=lambda hypothesis: hypothesis.score, reverse=True)

            def are_final(self, logprob, num_tokens, max_tokens):
                is_full = len(self.best) >= self._params.beam_width
                if is_full and self._params.early_stopping is not True:
                    length = num_tokens
                    if self._params.early_stopping == "never" and self._params.length_penalty > 0:
                        length = max_tokens
                    return not self._score(logprob, length) > self.best[-1].score
                return is_full

    class wrong_keeps_everything:
        """The list of hypotheses only grows."""

        red = "The best hypotheses are kept best first"

        class Hypotheses:
            def add(self, token_ids, logprob):
                self.best.append(Hypothesis(self._score(logprob, len(token_ids)), token_ids, logprob))
                self.best.sort(key=lambda hypothesis: -hypothesis.score)

    class wrong_sorts_by_logprob:
        """The length has no influence."""

        red = "A length penalty above 0 favors long outputs"

        class Hypotheses:
            def add(self, token_ids, logprob):
                new = Hypothesis(self._score(logprob, len(token_ids)), token_ids, logprob)
                self.best = sorted([*self.best, new], key=lambda each: -each.logprob)[: self._params.beam_width]

    class wrong_compares_with_the_best:
        """A beam would have to beat the best hypothesis."""

        red = "A search is final once the likeliest beam has no hope"

        class Hypotheses:
            def are_final(self, logprob, num_tokens, max_tokens):
                if len(self.best) < self._params.beam_width:
                    return False
                if self._params.early_stopping is True:
                    return True
                may_gain = self._params.early_stopping == "never" and self._params.length_penalty > 0
                return self._score(logprob, max_tokens if may_gain else num_tokens) <= self.best[0].score

    class wrong_ends_with_the_first_hypothesis:
        """early_stopping doesn't wait for beam_width hypotheses."""

        red = "there is only one hypothesis for two beams"

        class Hypotheses:
            def are_final(self, logprob, num_tokens, max_tokens):
                if not self.best:
                    return False
                if self._params.early_stopping is True:
                    return True
                may_gain = self._params.early_stopping == "never" and self._params.length_penalty > 0
                return self._score(logprob, max_tokens if may_gain else num_tokens) <= self.best[-1].score

    class wrong_always_hopes_for_the_most_tokens:
        """A score gets better with length, whatever the penalty."""

        red = "A search is final once the likeliest beam has no hope"

        class Hypotheses:
            def are_final(self, logprob, num_tokens, max_tokens):
                if len(self.best) < self._params.beam_width:
                    return False
                if self._params.early_stopping is True:
                    return True
                length = max_tokens if self._params.early_stopping == "never" else num_tokens
                return self._score(logprob, length) <= self.best[-1].score


class Step4:
    class right_goes_through_the_candidates_once:
        """One loop over the candidates."""

        class BeamSearch:
            def choose(self, candidates, hypotheses):
                kept = []
                for rank, candidate in enumerate(candidates):
                    if not candidate.has_ended:
                        kept.append(candidate)
                    elif rank < self._params.beam_width:
                        hypotheses.add(candidate.output, candidate.logprob)
                del kept[self._params.beam_width :]
                if kept:
                    best = kept[0]
                    most = best.parent.max_num_tokens - best.parent.num_prompt_tokens
                    if hypotheses.are_final(best.logprob, len(best.output), most):
                        return []
                return kept

    class right_counts_the_tokens_of_the_parent:
        """Work out the length from the parent's."""

        class BeamSearch:
            def choose(self, candidates, hypotheses):
                best = candidates[: self._params.beam_width]
                for ended in filter(lambda candidate: candidate.has_ended, best):
                    hypotheses.add(ended.output, ended.logprob)
                going_on = [each for each in candidates if not each.has_ended]
                if going_on:
                    first = going_on[0]
                    num_prompt_tokens = first.parent.num_prompt_tokens
                    num_tokens = first.parent.num_tokens + 1 - num_prompt_tokens
                    max_tokens = first.parent.max_num_tokens - num_prompt_tokens
                    if hypotheses.are_final(first.logprob, num_tokens, max_tokens):
                        going_on = []
                return going_on[: self._params.beam_width]

    class wrong_leaves_the_place_of_an_ended_beam_empty:
        """Only the first beam_width candidates may go on."""

        red = "The likeliest candidates that have not ended go on"

        class BeamSearch:
            def choose(self, candidates, hypotheses):
                kept = []
                for candidate in candidates[: self._params.beam_width]:
                    if candidate.has_ended:
                        hypotheses.add(candidate.output, candidate.logprob)
                    else:
                        kept.append(candidate)
                return kept

    class wrong_lets_ended_beams_go_on:
        """A candidate that has ended is a hypothesis and a beam."""

        red = "The likeliest candidates that have not ended go on"

        class BeamSearch:
            def choose(self, candidates, hypotheses):
                kept = candidates[: self._params.beam_width]
                for candidate in kept:
                    if candidate.has_ended:
                        hypotheses.add(candidate.output, candidate.logprob)
                return kept

    class wrong_keeps_every_end:
        """Any candidate that has ended becomes a hypothesis, however unlikely it is."""

        red = "An end among the best beam width becomes a hypothesis"

        class BeamSearch:
            def choose(self, candidates, hypotheses):
                for candidate in candidates:
                    if candidate.has_ended:
                        hypotheses.add(candidate.output, candidate.logprob)
                kept = [each for each in candidates if not each.has_ended][: self._params.beam_width]
                if not kept:
                    return []
                most = kept[0].parent.max_num_tokens - kept[0].parent.num_prompt_tokens
                return [] if hypotheses.are_final(kept[0].logprob, len(kept[0].output), most) else kept

    class wrong_counts_the_prompt_of_the_parent:
        """Give are_final() the number of tokens that the parent has."""

        red = "its logprob, its tokens without the prompt"

        class BeamSearch:
            def choose(self, candidates, hypotheses):
                for candidate in candidates[: self._params.beam_width]:
                    if candidate.has_ended:
                        hypotheses.add(candidate.output, candidate.logprob)
                kept = [each for each in candidates if not each.has_ended][: self._params.beam_width]
                if not kept:
                    return []
                parent = kept[0].parent
                most = parent.max_num_tokens - parent.num_prompt_tokens
                return [] if hypotheses.are_final(kept[0].logprob, parent.num_tokens, most) else kept

    class wrong_counts_the_prompt_in_the_most:
        """Give are_final() the most tokens of a sequence, prompt included."""

        red = "and the most of an output"

        class BeamSearch:
            def choose(self, candidates, hypotheses):
                for candidate in candidates[: self._params.beam_width]:
                    if candidate.has_ended:
                        hypotheses.add(candidate.output, candidate.logprob)
                kept = [each for each in candidates if not each.has_ended][: self._params.beam_width]
                if not kept:
                    return []
                most = kept[0].parent.max_num_tokens
                return [] if hypotheses.are_final(kept[0].logprob, len(kept[0].output), most) else kept

    class wrong_never_ends_early:
        """The search goes on to the most tokens."""

        red = "No beam goes on once the hypotheses are final"

        class BeamSearch:
            def choose(self, candidates, hypotheses):
                for candidate in candidates[: self._params.beam_width]:
                    if candidate.has_ended:
                        hypotheses.add(candidate.output, candidate.logprob)
                return [each for each in candidates if not each.has_ended][: self._params.beam_width]


class Step5:
    class right_sets_field_by_field:
        """One loop forks, and another one frees."""

        class BeamSearch:
            def fork(self, candidate):
                child = copy.copy(candidate.parent)
                child.token_ids = candidate.parent.token_ids + [candidate.token_id]
                child.cumulative_logprob = candidate.logprob
                self._kv_cache_manager.fork(candidate.parent, child)
                return child

            def step(self, beams, hypotheses):
                candidates = self.extend(beams)
                children = []
                for candidate in self.choose(candidates, hypotheses):
                    children.append(self.fork(candidate))
                for beam in reversed(beams):
                    self._kv_cache_manager.free(beam)
                return children

    class right_makes_a_new_sequence:
        """A child from dataclasses.replace(), with its own fields set afterwards."""

        class BeamSearch:
            def fork(self, candidate):
                from dataclasses import replace

                child = replace(candidate.parent)
                child.token_ids = [*candidate.parent.token_ids, candidate.token_id]
                child.cumulative_logprob = candidate.logprob
                self._kv_cache_manager.fork(candidate.parent, child)
                return child

    class wrong_shares_the_list_of_tokens:
        """All children of a parent append to one list."""

        red = "the parent has no new token"

        class BeamSearch:
            def fork(self, candidate):
                child = copy.copy(candidate.parent)
                child.token_ids.append(candidate.token_id)
                child.cumulative_logprob = candidate.logprob
                self._kv_cache_manager.fork(candidate.parent, child)
                return child

    class wrong_keeps_the_old_logprob:
        """The child has the probability of its parent."""

        red = "a logprob of its own"

        class BeamSearch:
            def fork(self, candidate):
                child = copy.copy(candidate.parent)
                child.token_ids = [*child.token_ids, candidate.token_id]
                self._kv_cache_manager.fork(candidate.parent, child)
                return child

    class wrong_keeps_the_parents:
        """Nobody frees the beams that were extended."""

        red = "a parent still holds blocks"

        class BeamSearch:
            def step(self, beams, hypotheses):
                return [self.fork(candidate) for candidate in self.choose(self.extend(beams), hypotheses)]

    class wrong_frees_the_parents_first:
        """Nobody holds the blocks that the children need."""

        red = "a block that a child shares was free for a moment"

        class BeamSearch:
            def step(self, beams, hypotheses):
                chosen = self.choose(self.extend(beams), hypotheses)
                for beam in beams:
                    self._kv_cache_manager.free(beam)
                return [self.fork(candidate) for candidate in chosen]

    class wrong_frees_only_beams_without_children:
        """A parent whose children go on keeps its blocks."""

        red = "a parent still holds blocks"

        class BeamSearch:
            def step(self, beams, hypotheses):
                chosen = self.choose(self.extend(beams), hypotheses)
                children = [self.fork(candidate) for candidate in chosen]
                for beam in beams:
                    if all(beam is not candidate.parent for candidate in chosen):
                        self._kv_cache_manager.free(beam)
                return children
