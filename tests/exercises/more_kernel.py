"""Solutions and mistakes for the steps of the branch more_kernel."""


class Step1:
    class right_counts_backwards:
        """Count the tokens that follow each one, with tensors."""

        def contexts(step):
            ends = torch.tensor(step.query_start_loc[1:])
            lengths = torch.tensor(step.query_start_loc).diff()
            seqs = torch.arange(len(ends)).repeat_interleave(lengths)
            num_after = ends[seqs] - torch.arange(1, len(seqs) + 1)
            context_lens = torch.tensor(step.context_lens)[seqs] - num_after
            return seqs.to(step.block_tables.device), context_lens.to(step.block_tables.device)

    class right_goes_token_by_token:
        """One entry at a time."""

        def contexts(step):
            pairs = []
            for seq, length in enumerate(step.context_lens):
                num_tokens = step.query_start_loc[seq + 1] - step.query_start_loc[seq]
                for i in range(num_tokens):
                    pairs.append((seq, length - num_tokens + i + 1))
            return torch.tensor(pairs, device=step.block_tables.device).T.contiguous().unbind()

    class wrong_sees_everything:
        """Give each token the context of the last one: it sees the future."""

        red = "Each token of a prompt sees one more"

        def contexts(step):
            lengths = torch.tensor(step.query_start_loc).diff()
            seqs = torch.arange(len(lengths)).repeat_interleave(lengths)
            return seqs, torch.tensor(step.context_lens)[seqs]

    class wrong_forgets_the_token_itself:
        """Count only the tokens before it."""

        red = "A decoded token sees its whole sequence"

        def contexts(step):
            seqs, context_lens = [], []
            for seq, (first, last) in enumerate(pairwise(step.query_start_loc)):
                seqs += [seq] * (last - first)
                context_lens += range(step.context_lens[seq] - (last - first), step.context_lens[seq])
            return torch.tensor([seqs, context_lens]).unbind()

    class wrong_forgets_the_past:
        """Count from the first token of this step."""

        red = "A decoded token sees its whole sequence"

        def contexts(step):
            seqs, context_lens = [], []
            for seq, (first, last) in enumerate(pairwise(step.query_start_loc)):
                seqs += [seq] * (last - first)
                context_lens += range(1, last - first + 1)
            return torch.tensor([seqs, context_lens]).unbind()


class Step2:
    class right_goes_key_by_key:
        """Keys outside, heads inside."""

        def score_block(query, keys, kv_head, scores):
            group, num_keys = scores.shape
            for i in range(num_keys):
                for head in range(group):
                    total = np.float32(0)
                    for d in range(keys.shape[2]):
                        total += keys[i, kv_head, d] * query[head, d]
                    scores[head, i] = total / np.float32(np.sqrt(keys.shape[2]))

    class right_multiplies_arrays:
        """An array of products for each pair."""

        def score_block(query, keys, kv_head, scores):
            for head in range(len(query)):
                for i in range(scores.shape[1]):
                    scores[head, i] = (query[head] * keys[i, kv_head]).sum() * query.shape[1] ** -0.5

    class wrong_reads_the_whole_block:
        """Take the number of keys from the block."""

        red = "Keys past the context are not read"

        def score_block(query, keys, kv_head, scores):
            for head in range(query.shape[0]):
                for i in range(keys.shape[0]):
                    score = np.float32(0)
                    for d in range(query.shape[1]):
                        score += query[head, d] * keys[i, kv_head, d]
                    scores[head, i] = score * query.shape[1] ** -0.5

    class wrong_takes_the_first_kv_head:
        """All heads get the keys of KV head 0."""

        red = "Each kv head has keys of its own"

        def score_block(query, keys, kv_head, scores):
            for head in range(scores.shape[0]):
                for i in range(scores.shape[1]):
                    score = np.float32(0)
                    for d in range(query.shape[1]):
                        score += query[head, d] * keys[i, 0, d]
                    scores[head, i] = score * query.shape[1] ** -0.5

    class wrong_forgets_the_scale:
        """The products are not divided by the root of head_dim."""

        red = "scores [group, num_keys]: off by"

        def score_block(query, keys, kv_head, scores):
            for head in range(scores.shape[0]):
                for i in range(scores.shape[1]):
                    score = np.float32(0)
                    for d in range(query.shape[1]):
                        score += query[head, d] * keys[i, kv_head, d]
                    scores[head, i] = score

    class wrong_fills_an_array_of_its_own:
        """Bind the name to a new array: the one that was given stays as it was."""

        red = "scores holds NaN: set every number of the array that you are given, with ="

        def score_block(query, keys, kv_head, scores):
            scores = query @ keys[: scores.shape[1], kv_head].T * np.float32(query.shape[1] ** -0.5)

    class wrong_adds_to_what_is_there:
        """The array is not zeros at the start."""

        red = "scores holds NaN: set every number of the array that you are given, with ="

        def score_block(query, keys, kv_head, scores):
            scale = np.float32(query.shape[1] ** -0.5)
            for head in range(scores.shape[0]):
                for i in range(scores.shape[1]):
                    for d in range(query.shape[1]):
                        scores[head, i] += query[head, d] * keys[i, kv_head, d] * scale


class Step3:
    class right_shrinks_only_if_it_must:
        """Leave the sums alone while no score is higher."""

        def add_block(scores, values, kv_head, sums, totals, highest):
            for head in range(scores.shape[0]):
                top = scores[head].max()
                if top > highest[head]:
                    share = np.exp(highest[head] - top)
                    totals[head] *= share
                    for d in range(sums.shape[1]):
                        sums[head, d] *= share
                    highest[head] = top
                for i in range(scores.shape[1]):
                    weight = np.exp(scores[head, i] - highest[head])
                    totals[head] += weight
                    for d in range(sums.shape[1]):
                        sums[head, d] += weight * values[i, kv_head, d]

    class right_goes_key_by_key:
        """A running softmax over single keys: more exponentials, the same result."""

        def add_block(scores, values, kv_head, sums, totals, highest):
            for head in range(scores.shape[0]):
                for i in range(scores.shape[1]):
                    top = max(highest[head], scores[head, i])
                    share, weight = np.exp(highest[head] - top), np.exp(scores[head, i] - top)
                    highest[head] = top
                    totals[head] = totals[head] * share + weight
                    for d in range(sums.shape[1]):
                        sums[head, d] = sums[head, d] * share + weight * values[i, kv_head, d]

    class wrong_never_shrinks:
        """Add under the new maximum, and keep what was added under the old one."""

        red = "A higher score shrinks what was added before"

        def add_block(scores, values, kv_head, sums, totals, highest):
            for head in range(scores.shape[0]):
                highest[head] = max(highest[head], scores[head].max())
                for i in range(scores.shape[1]):
                    weight = np.exp(scores[head, i] - highest[head])
                    totals[head] += weight
                    for d in range(sums.shape[1]):
                        sums[head, d] += weight * values[i, kv_head, d]

    class wrong_takes_the_block_s_maximum:
        """Each block's own maximum, even if it is lower."""

        red = "A lower score leaves what was added before"

        def add_block(scores, values, kv_head, sums, totals, highest):
            for head in range(scores.shape[0]):
                top = scores[head].max()
                share = min(np.exp(highest[head] - top), np.float32(1))
                highest[head] = top
                totals[head] *= share
                for d in range(sums.shape[1]):
                    sums[head, d] *= share
                for i in range(scores.shape[1]):
                    weight = np.exp(scores[head, i] - top)
                    totals[head] += weight
                    for d in range(sums.shape[1]):
                        sums[head, d] += weight * values[i, kv_head, d]

    class wrong_exponentiates_the_scores:
        """No maximum at all."""

        red = "One block is softmax over its keys"

        def add_block(scores, values, kv_head, sums, totals, highest):
            for head in range(scores.shape[0]):
                highest[head] = max(highest[head], scores[head].max())
                for i in range(scores.shape[1]):
                    weight = np.exp(scores[head, i])
                    totals[head] += weight
                    for d in range(sums.shape[1]):
                        sums[head, d] += weight * values[i, kv_head, d]

    class wrong_shrinks_only_the_sums:
        """The totals keep their size."""

        red = "the totals, 1/3 + 1: off by"

        def add_block(scores, values, kv_head, sums, totals, highest):
            for head in range(scores.shape[0]):
                top = max(highest[head], scores[head].max())
                share = np.exp(highest[head] - top)
                highest[head] = top
                for d in range(sums.shape[1]):
                    sums[head, d] *= share
                for i in range(scores.shape[1]):
                    weight = np.exp(scores[head, i] - top)
                    totals[head] += weight
                    for d in range(sums.shape[1]):
                        sums[head, d] += weight * values[i, kv_head, d]

    class wrong_reads_the_whole_block:
        """Take the number of keys from the values, and a weight of 0 for those without a score."""

        red = "Values past the context are not read"

        def add_block(scores, values, kv_head, sums, totals, highest):
            for head in range(scores.shape[0]):
                top = max(highest[head], scores[head].max())
                share = np.exp(highest[head] - top)
                highest[head], totals[head] = top, totals[head] * share
                for d in range(sums.shape[1]):
                    sums[head, d] *= share
                for i in range(values.shape[0]):
                    weight = np.float32(0)
                    if i < scores.shape[1]:
                        weight = np.exp(scores[head, i] - top)
                    totals[head] += weight
                    for d in range(sums.shape[1]):
                        sums[head, d] += weight * values[i, kv_head, d]


class Step4:
    class right_counts_blocks:
        """The number of blocks first, and a loop over them for each KV head of a token."""

        def paged_attention(out, q, blocks, block_tables, seqs, context_lens, layer):
            group, head_dim, block_size = q.shape[2], q.shape[3], blocks.shape[3]
            for token in numba.prange(q.shape[0]):
                table, length = block_tables[seqs[token]], context_lens[token]
                for kv_head in range(q.shape[1]):
                    sums, totals = np.zeros((group, head_dim), np.float32), np.zeros(group, np.float32)
                    highest = np.full(group, -np.inf, np.float32)
                    for number in range((length + block_size - 1) // block_size):
                        num_keys = min(block_size, length - number * block_size)
                        scores = np.empty((group, num_keys), np.float32)
                        keys, values = blocks[table[number], layer, 0], blocks[table[number], layer, 1]
                        score_block(q[token, kv_head], keys, kv_head, scores)
                        add_block(scores, values, kv_head, sums, totals, highest)
                    for head in range(group):
                        for d in range(head_dim):
                            out[token, kv_head, head, d] = sums[head, d] / totals[head]

        class KernelAttention:
            def plan(self, step):
                seqs, context_lens = contexts(step)
                blocks = self._kv_cache.blocks

                def attend(layer, q, k, v):
                    self._kv_cache.write(layer, step.slot_mapping, k, v)
                    num_tokens, num_heads, head_dim = q.shape
                    grouped = q.reshape(num_tokens, k.shape[1], num_heads // k.shape[1], head_dim).contiguous()
                    out = torch.zeros(grouped.shape, dtype=q.dtype, device=q.device)
                    run_kernel(out, grouped, blocks, step.block_tables, seqs, context_lens, layer=layer)
                    return out.view(q.shape)

                return attend

    class right_has_one_array_with_a_row_for_each_item:
        """The arrays of all items at once, each with rows of its own."""

        def paged_attention(out, q, blocks, block_tables, seqs, context_lens, layer):
            num_tokens, num_kv_heads, group, head_dim = q.shape
            num_items, block_size = num_tokens * num_kv_heads, blocks.shape[3]
            sums, totals = np.zeros((num_items, group, head_dim), np.float32), np.zeros((num_items, group), np.float32)
            highest = np.full((num_items, group), -np.inf, np.float32)
            for item in numba.prange(num_items):
                token, kv_head = item // num_kv_heads, item % num_kv_heads
                scores = np.empty((group, block_size), np.float32)
                for start in range(0, context_lens[token], block_size):
                    block = blocks[block_tables[seqs[token], start // block_size], layer]
                    some = scores[:, : context_lens[token] - start]
                    score_block(q[token, kv_head], block[0], kv_head, some)
                    add_block(some, block[1], kv_head, sums[item], totals[item], highest[item])
                for head in range(group):
                    for d in range(head_dim):
                        out[token, kv_head, head, d] = sums[item, head, d] / totals[item, head]

    class right_walks_until_nothing_is_left:
        """Count down what is left of the context."""

        def paged_attention(out, q, blocks, block_tables, seqs, context_lens, layer):
            num_tokens, num_kv_heads, group, head_dim = q.shape
            for item in numba.prange(num_tokens * num_kv_heads):
                token, kv_head = item // num_kv_heads, item % num_kv_heads
                sums, totals = np.zeros((group, head_dim), np.float32), np.zeros(group, np.float32)
                highest = np.full(group, -np.inf, np.float32)
                left, number = context_lens[token], 0
                while left > 0:
                    block = block_tables[seqs[token], number]
                    scores = np.empty((group, min(left, blocks.shape[3])), np.float32)
                    score_block(q[token, kv_head], blocks[block, layer, 0], kv_head, scores)
                    add_block(scores, blocks[block, layer, 1], kv_head, sums, totals, highest)
                    left -= blocks.shape[3]
                    number += 1
                for head in range(group):
                    out[token, kv_head, head] = sums[head] / totals[head]

    class wrong_reads_the_last_block_to_its_end:
        """Never cut the scores to what is left of the context."""

        red = "attention of token 0 is NaN the pool is NaN where no token is: a slot was read that has none"

        def paged_attention(out, q, blocks, block_tables, seqs, context_lens, layer):
            num_tokens, num_kv_heads, group, head_dim = q.shape
            for item in numba.prange(num_tokens * num_kv_heads):
                token, kv_head = item // num_kv_heads, item % num_kv_heads
                sums, totals = np.zeros((group, head_dim), np.float32), np.zeros(group, np.float32)
                highest, scores = np.full(group, -np.inf, np.float32), np.empty((group, blocks.shape[3]), np.float32)
                for start in range(0, context_lens[token], blocks.shape[3]):
                    block = blocks[block_tables[seqs[token], start // blocks.shape[3]], layer]
                    score_block(q[token, kv_head], block[0], kv_head, scores)
                    add_block(scores, block[1], kv_head, sums, totals, highest)
                for head in range(group):
                    out[token, kv_head, head] = sums[head] / totals[head]

    class wrong_takes_blocks_in_a_row:
        """Follow the first block of the table by its neighbors in the pool."""

        red = "A prompt attends within itself"

        def paged_attention(out, q, blocks, block_tables, seqs, context_lens, layer):
            num_tokens, num_kv_heads, group, head_dim = q.shape
            for item in numba.prange(num_tokens * num_kv_heads):
                token, kv_head = item // num_kv_heads, item % num_kv_heads
                sums, totals = np.zeros((group, head_dim), np.float32), np.zeros(group, np.float32)
                highest, scores = np.full(group, -np.inf, np.float32), np.empty((group, blocks.shape[3]), np.float32)
                first = block_tables[seqs[token], 0]
                for start in range(0, context_lens[token], blocks.shape[3]):
                    block = blocks[(first + start // blocks.shape[3]) % len(blocks), layer]
                    some = scores[:, : context_lens[token] - start]
                    score_block(q[token, kv_head], block[0], kv_head, some)
                    add_block(some, block[1], kv_head, sums, totals, highest)
                for head in range(group):
                    out[token, kv_head, head] = sums[head] / totals[head]

    class wrong_shares_the_sums:
        """One running softmax for all items: the second one starts with what the first has added."""

        red = "A prompt attends within itself"

        def paged_attention(out, q, blocks, block_tables, seqs, context_lens, layer):
            num_tokens, num_kv_heads, group, head_dim = q.shape
            sums, totals = np.zeros((group, head_dim), np.float32), np.zeros(group, np.float32)
            highest, scores = np.full(group, -np.inf, np.float32), np.empty((group, blocks.shape[3]), np.float32)
            for item in numba.prange(num_tokens * num_kv_heads):
                token, kv_head = item // num_kv_heads, item % num_kv_heads
                for start in range(0, context_lens[token], blocks.shape[3]):
                    block = blocks[block_tables[seqs[token], start // blocks.shape[3]], layer]
                    some = scores[:, : context_lens[token] - start]
                    score_block(q[token, kv_head], block[0], kv_head, some)
                    add_block(some, block[1], kv_head, sums, totals, highest)
                for head in range(group):
                    out[token, kv_head, head] = sums[head] / totals[head]

    class wrong_shares_the_sums_one_item_at_a_time:
        """Reset for each item, and still shared: two cores write to them at the same time."""

        red = "items 0 and 1 of prange write to the same sums, at the same time"

        def paged_attention(out, q, blocks, block_tables, seqs, context_lens, layer):
            num_tokens, num_kv_heads, group, head_dim = q.shape
            sums, totals = np.zeros((group, head_dim), np.float32), np.zeros(group, np.float32)
            highest, scores = np.full(group, -np.inf, np.float32), np.empty((group, blocks.shape[3]), np.float32)
            for item in numba.prange(num_tokens * num_kv_heads):
                token, kv_head = item // num_kv_heads, item % num_kv_heads
                sums[:], totals[:], highest[:] = 0, 0, -np.inf
                for start in range(0, context_lens[token], blocks.shape[3]):
                    block = blocks[block_tables[seqs[token], start // blocks.shape[3]], layer]
                    some = scores[:, : context_lens[token] - start]
                    score_block(q[token, kv_head], block[0], kv_head, some)
                    add_block(some, block[1], kv_head, sums, totals, highest)
                for head in range(group):
                    for d in range(head_dim):
                        out[token, kv_head, head, d] = sums[head, d] / totals[head]

    class wrong_shares_the_scores:
        """One array of scores for all items: one core overwrites what another one has just computed."""

        red = "items 0 and 1 of prange write to the same scores, at the same time"

        def paged_attention(out, q, blocks, block_tables, seqs, context_lens, layer):
            num_tokens, num_kv_heads, group, head_dim = q.shape
            scores = np.empty((group, blocks.shape[3]), np.float32)
            for item in numba.prange(num_tokens * num_kv_heads):
                token, kv_head = item // num_kv_heads, item % num_kv_heads
                sums, totals = np.zeros((group, head_dim), np.float32), np.zeros(group, np.float32)
                highest = np.full(group, -np.inf, np.float32)
                for start in range(0, context_lens[token], blocks.shape[3]):
                    block = blocks[block_tables[seqs[token], start // blocks.shape[3]], layer]
                    some = scores[:, : context_lens[token] - start]
                    score_block(q[token, kv_head], block[0], kv_head, some)
                    add_block(some, block[1], kv_head, sums, totals, highest)
                for head in range(group):
                    for d in range(head_dim):
                        out[token, kv_head, head, d] = sums[head, d] / totals[head]

    class wrong_divides_whole_arrays:
        """Right in Python. Numba doesn't compile this division inside prange."""

        red = "A kernel and tiles give the same logits"

        def paged_attention(out, q, blocks, block_tables, seqs, context_lens, layer):
            num_tokens, num_kv_heads, group, head_dim = q.shape
            block_size = blocks.shape[3]
            for item in numba.prange(num_tokens * num_kv_heads):
                token, kv_head = item // num_kv_heads, item % num_kv_heads
                sums, totals = np.zeros((group, head_dim), np.float32), np.zeros(group, np.float32)
                highest, scores = np.full(group, -np.inf, np.float32), np.empty((group, block_size), np.float32)
                for start in range(0, context_lens[token], block_size):
                    block = blocks[block_tables[seqs[token], start // block_size], layer]
                    some = scores[:, : context_lens[token] - start]
                    score_block(q[token, kv_head], block[0], kv_head, some)
                    add_block(some, block[1], kv_head, sums, totals, highest)
                out[token, kv_head] = sums / totals[:, None]

    class wrong_writes_after_it_has_read:
        """A token's own key is not in the pool yet."""

        red = "a slot was read that has none, or before it was written"

        class KernelAttention:
            def plan(self, step):
                seqs, context_lens = contexts(step)

                def attend(layer, q, k, v):
                    grouped = q.unflatten(1, (k.shape[1], -1)).contiguous()
                    out = torch.empty_like(grouped)
                    run_kernel(out, grouped, self._kv_cache.blocks, step.block_tables, seqs, context_lens, layer=layer)
                    self._kv_cache.write(layer, step.slot_mapping, k, v)
                    return out.flatten(1, 2)

                return attend

    class wrong_copies_the_blocks_first:
        """Right, but the keys and values of each sequence are copied out of the pool."""

        red = "Nothing is copied out of the pool"

        class KernelAttention:
            def plan(self, step):
                seqs, context_lens = contexts(step)
                tables = torch.arange(step.block_tables.numel()).view(step.block_tables.shape)

                def attend(layer, q, k, v):
                    self._kv_cache.write(layer, step.slot_mapping, k, v)
                    copies = self._kv_cache.read(layer, step.block_tables)
                    size = self._kv_cache.block_size
                    blocks = torch.stack([copy.unflatten(1, (-1, size)).flatten(0, 1) for copy in copies], 1)
                    grouped = q.unflatten(1, (k.shape[1], -1)).contiguous()
                    out = torch.empty_like(grouped)
                    run_kernel(out, grouped, blocks.unsqueeze(1).contiguous(), tables, seqs, context_lens, layer=0)
                    return out.flatten(1, 2)

                return attend
