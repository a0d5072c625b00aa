"""Solutions and mistakes for the steps of stage 3."""


class Step1:
    class right_subtracts_the_larger_lse:
        """Two weights relative to the larger lse, and their sum."""

        def merge_attn_states(a, b):
            top = torch.maximum(a.lse, b.lse)
            weight_a, weight_b = torch.exp(a.lse - top), torch.exp(b.lse - top)
            total = weight_a + weight_b
            out = (a.out * weight_a[..., None] + b.out * weight_b[..., None]) / total[..., None]
            return Part(out, top + total.log())

    class right_interpolates:
        """The share of a is a sigmoid of the difference."""

        def merge_attn_states(a, b):
            share = torch.sigmoid(a.lse - b.lse)[..., None]
            return Part(torch.lerp(b.out, a.out, share), torch.logaddexp(a.lse, b.lse))

    class right_stacks_the_parts:
        """The shares are a softmax over the parts."""

        def merge_attn_states(a, b):
            lse = torch.stack((a.lse, b.lse))
            outs = torch.stack((a.out, b.out))
            return Part((outs * lse.softmax(0).unsqueeze(-1)).sum(0), lse.logsumexp(0))

    class wrong_averages:
        """Both parts count the same."""

        red = "the out of all three is off by"

        def merge_attn_states(a, b):
            return Part((a.out + b.out) / 2, torch.logaddexp(a.lse, b.lse))

    class wrong_adds_logarithms:
        """The lse of both is taken to be the sum of both."""

        red = "the lse of all three, 5 + log(3), is off by"

        def merge_attn_states(a, b):
            lse = torch.logaddexp(a.lse, b.lse)
            out = a.out * (a.lse - lse).exp()[..., None] + b.out * (b.lse - lse).exp()[..., None]
            return Part(out, a.lse + b.lse)

    class wrong_exponentiates_each_lse:
        """exp() of a large lse is infinite."""

        red = "the out of both is not finite: it holds nan"
        unseen = "the scores of this model are far below 88, where exp() overflows"

        def merge_attn_states(a, b):
            sum_a, sum_b = a.lse.exp(), b.lse.exp()
            total = sum_a + sum_b
            out = (a.out * sum_a[..., None] + b.out * sum_b[..., None]) / total[..., None]
            return Part(out, total.log())

    class wrong_adds_to_the_first_lse:
        """Relative to the lse of the first part, which may be -inf."""

        red = "the out of both, of which one has no keys, is not finite: it holds nan"
        unseen = "each query sees a key of the first tile, so the lse of the first part is finite"

        def merge_attn_states(a, b):
            ratio = (b.lse - a.lse).exp().clamp(max=LIMITS.max)
            lse = a.lse + ratio.log1p()
            out = a.out * (a.lse - lse).exp()[..., None] + b.out * (b.lse - lse).exp()[..., None]
            return Part(out, lse)

    class wrong_changes_its_inputs:
        """The first part is overwritten."""

        red = "merging leaves the two parts as they were"
        unseen = "attention merges copies of the rows"

        def merge_attn_states(a, b):
            lse = torch.logaddexp(a.lse, b.lse)
            a.out.mul_((a.lse - lse).exp()[..., None]).add_(b.out * (b.lse - lse).exp()[..., None])
            return Part(a.out, lse)


class Step2:
    class right_uses_logsumexp:
        """The lse first, -inf for a query that sees nothing; then the weights from it."""

        def attend_part(q, k, v, is_hidden):
            scale = q.shape[-1] ** -0.5
            scores = torch.einsum("nkgqd,nksd->nkgqs", q.float(), k.float()) * scale
            scores = scores.masked_fill(is_hidden, -torch.inf)
            lse = scores.logsumexp(-1)
            weights = (scores - lse.clamp(min=LIMITS.min).unsqueeze(-1)).exp()
            return Part(torch.einsum("nkgqs,nksd->nkgqd", weights, v.float()), lse)

    class right_repairs_softmax:
        """torch's softmax, with zeros where it is NaN."""

        def attend_part(q, k, v, is_hidden):
            q = q.float() / q.shape[-1] ** 0.5
            scores = (q.flatten(2, 3) @ k.float().transpose(-1, -2)).unflatten(2, q.shape[2:4])
            scores = torch.where(is_hidden, torch.tensor(float("-inf"), device=q.device), scores)
            weights = torch.softmax(scores, dim=-1).nan_to_num(nan=0.0)
            out = (weights.flatten(2, 3) @ v.float()).unflatten(2, q.shape[2:4])
            return Part(out, torch.logsumexp(scores, dim=-1))

    class right_repeats_the_keys:
        """Every query head gets keys of its own: more memory for a part, the same result."""

        def attend_part(q, k, v, is_hidden):
            q, k, v = q.float(), k.float().unsqueeze(2), v.float().unsqueeze(2)
            scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(is_hidden, -torch.inf)
            top = scores.max(dim=-1, keepdim=True).values
            top = torch.where(top.isinf(), torch.zeros_like(top), top)
            weights = (scores - top).exp()
            total = weights.sum(-1, keepdim=True)
            out = (weights @ v) / torch.where(total == 0, torch.ones_like(total), total)
            return Part(out, (top + total.log()).squeeze(-1))

    class wrong_forgets_the_scale:
        """The scores are not divided by the root of head_dim."""

        red = "the out of 9 keys that nothing hides is off by"

        def attend_part(q, k, v, is_hidden):
            scores = torch.einsum("nkgqd,nksd->nkgqs", q.float(), k.float()).masked_fill(is_hidden, -torch.inf)
            weights = scores.softmax(-1).nan_to_num(0.0)
            return Part(torch.einsum("nkgqs,nksd->nkgqd", weights, v.float()), scores.logsumexp(-1))

    class wrong_stays_in_half_precision:
        """The part has the dtype of its inputs."""

        red = "the inputs are bfloat16"
        unseen = "play computes in float32"

        def attend_part(q, k, v, is_hidden):
            scores = torch.einsum("nkgqd,nksd->nkgqs", q, k) * q.shape[-1] ** -0.5
            scores = scores.masked_fill(is_hidden, -torch.inf)
            weights = scores.softmax(-1).nan_to_num(0.0)
            return Part(torch.einsum("nkgqs,nksd->nkgqd", weights, v), scores.logsumexp(-1))

    class wrong_hides_after_softmax:
        """Hidden keys lose their weight, but the others were divided by a sum with them in it."""

        red = "9 keys of which some are hidden"

        def attend_part(q, k, v, is_hidden):
            scores = torch.einsum("nkgqd,nksd->nkgqs", q.float(), k.float()) * q.shape[-1] ** -0.5
            weights = scores.softmax(-1).masked_fill(is_hidden, 0.0)
            return Part(torch.einsum("nkgqs,nksd->nkgqd", weights, v.float()), scores.logsumexp(-1))

    class wrong_subtracts_minus_infinity:
        """The largest score of a query that sees nothing is -inf."""

        red = "all keys are hidden from one query, and its out is not finite"

        def attend_part(q, k, v, is_hidden):
            scores = torch.einsum("nkgqd,nksd->nkgqs", q.float(), k.float()) * q.shape[-1] ** -0.5
            scores = scores.masked_fill(is_hidden, -torch.inf)
            top = scores.amax(-1, keepdim=True)
            weights = (scores - top).exp()
            total = weights.sum(-1, keepdim=True)
            out = torch.einsum("nkgqs,nksd->nkgqd", weights, v.float()) / total
            return Part(out, (top + total.log()).squeeze(-1))

    class wrong_exponentiates_the_scores:
        """Nothing is subtracted from the scores."""

        red = "with scores in the hundreds, the out is not finite"
        unseen = "the scores of this model are far below 88, where exp() overflows"

        def attend_part(q, k, v, is_hidden):
            scores = torch.einsum("nkgqd,nksd->nkgqs", q.float(), k.float()) * q.shape[-1] ** -0.5
            weights = scores.masked_fill(is_hidden, -torch.inf).exp()
            total = weights.sum(-1, keepdim=True).clamp(min=LIMITS.tiny)
            out = torch.einsum("nkgqs,nksd->nkgqd", weights, v.float()) / total
            return Part(out, total.log().squeeze(-1))

    class wrong_hides_by_a_large_number:
        """A hidden score is very low: a query that sees nothing gets the mean of what it may not see."""

        red = "all keys are hidden from one query, and its out is not zeros"
        unseen = "merging gives this part no share"

        def attend_part(q, k, v, is_hidden):
            scores = torch.einsum("nkgqd,nksd->nkgqs", q.float(), k.float()) * q.shape[-1] ** -0.5
            scores = scores.masked_fill(is_hidden, -1e9)
            return Part(torch.einsum("nkgqs,nksd->nkgqd", scores.softmax(-1), v.float()), scores.logsumexp(-1))


class Step3:
    class right_looks_for_first_slots:
        """A block is new if the step has the token of its first slot. Short rows repeat their last block."""

        class ModelRunner:
            def _metadata(self, batch, rows):
                size = self._block_size
                starts, context_lens = [0], []
                for seq, num_tokens in batch:
                    starts.append(starts[-1] + num_tokens)
                    context_lens.append(seq.num_computed_tokens + num_tokens)
                width = cdiv(max(context_lens), size)
                tables = [[seq.block_table[min(i, len(seq.block_table) - 1)] for i in range(width)] for seq, _ in batch]
                new_blocks = [seq.block_table[position // size] for seq, position in rows if position % size == 0]
                return AttentionMetadata(
                    starts,
                    context_lens,
                    self._tensor(tables),
                    self._tensor([self._slot(seq, position) for seq, position in rows]),
                    self._tensor(new_blocks),
                )

    class right_treats_prompts_and_decodes_apart:
        """A prompt brings all of its blocks, a decode at most its last one. Short rows repeat their first block."""

        class ModelRunner:
            def _metadata(self, batch, rows):
                tables = [list(seq.block_table) for seq, _ in batch]
                longest = max(len(table) for table in tables)
                new_blocks = []
                for (seq, _), table in zip(batch, tables, strict=True):
                    if seq.num_computed_tokens == 0:
                        new_blocks.extend(table)
                    elif seq.num_computed_tokens % self._block_size == 0:
                        new_blocks.append(table[-1])
                for table in tables:
                    while len(table) < longest:
                        table.append(table[0])
                return AttentionMetadata(
                    query_start_loc=[0, *accumulate(num_tokens for _, num_tokens in batch)],
                    context_lens=[seq.num_tokens for seq, _ in batch],
                    block_tables=self._tensor(tables),
                    slot_mapping=self._tensor([self._slot(seq, position) for seq, position in rows]),
                    new_blocks=self._tensor(new_blocks),
                )

    class wrong_pads_with_block_0:
        """A short row reads memory of another sequence."""

        red = "the row of a sequence in blocks [1] continues with these blocks only"
        unseen = "a mask hides the padding, and no block of this run has a NaN"

        class ModelRunner:
            def _metadata(self, batch, rows):
                tables = [seq.block_table for seq, _ in batch]
                width = max(map(len, tables))
                starts = [cdiv(seq.num_computed_tokens, self._block_size) for seq, _ in batch]
                return AttentionMetadata(
                    query_start_loc=[0, *accumulate(num_tokens for _, num_tokens in batch)],
                    context_lens=[seq.num_tokens for seq, _ in batch],
                    block_tables=self._tensor([table + [0] * (width - len(table)) for table in tables]),
                    slot_mapping=self._tensor([self._slot(seq, position) for seq, position in rows]),
                    new_blocks=self._tensor([b for t, start in zip(tables, starts, strict=True) for b in t[start:]]),
                )

    class wrong_counts_the_tokens_before:
        """The tokens of this step are not in the context."""

        red = "tokens that each sequence has after this step"

        class ModelRunner:
            def _metadata(self, batch, rows):
                tables = [seq.block_table for seq, _ in batch]
                width = max(map(len, tables))
                starts = [cdiv(seq.num_computed_tokens, self._block_size) for seq, _ in batch]
                return AttentionMetadata(
                    query_start_loc=[0, *accumulate(num_tokens for _, num_tokens in batch)],
                    context_lens=[seq.num_computed_tokens for seq, _ in batch],
                    block_tables=self._tensor([table + table[-1:] * (width - len(table)) for table in tables]),
                    slot_mapping=self._tensor([self._slot(seq, position) for seq, position in rows]),
                    new_blocks=self._tensor([b for t, start in zip(tables, starts, strict=True) for b in t[start:]]),
                )

    class wrong_clears_a_block_in_use:
        """The block that holds the last tokens counts as new, and would be cleared."""

        red = "a block is new if this step writes its first slot"

        class ModelRunner:
            def _metadata(self, batch, rows):
                tables = [seq.block_table for seq, _ in batch]
                width = max(map(len, tables))
                starts = [seq.num_computed_tokens // self._block_size for seq, _ in batch]
                return AttentionMetadata(
                    query_start_loc=[0, *accumulate(num_tokens for _, num_tokens in batch)],
                    context_lens=[seq.num_tokens for seq, _ in batch],
                    block_tables=self._tensor([table + table[-1:] * (width - len(table)) for table in tables]),
                    slot_mapping=self._tensor([self._slot(seq, position) for seq, position in rows]),
                    new_blocks=self._tensor([b for t, start in zip(tables, starts, strict=True) for b in t[start:]]),
                )


class Step4:
    class right_starts_from_nothing:
        """The result starts as a part without keys, and every tile is merged in the same way."""

        class PagedAttention:
            def _attend(self, slot_mapping, batches, layer, q, k, v):
                self._kv_cache.write(layer, slot_mapping, k, v)
                result = torch.zeros_like(q)
                num_kv_heads = k.shape[1]
                for batch in batches:
                    num_rows, query_len = batch.tokens.shape
                    grouped = q[batch.tokens].view(num_rows, query_len, num_kv_heads, -1, q.shape[-1])
                    grouped = grouped.permute(0, 2, 3, 1, 4)
                    out = torch.zeros(grouped.shape, device=q.device)
                    lse = torch.full(grouped.shape[:-1], float("-inf"), device=q.device)
                    for rows, blocks, keys, queries in batch.tiles:
                        tile_k, tile_v = (x.transpose(1, 2) for x in self._kv_cache.read(layer, blocks))
                        part = attend_part(grouped[rows], tile_k, tile_v, keys > queries)
                        out[rows], lse[rows] = merge_attn_states(Part(out[rows], lse[rows]), part)
                    out = out.permute(0, 3, 1, 2, 4).reshape(num_rows, query_len, -1, q.shape[-1])
                    result[batch.tokens] = out.to(q.dtype)
                return result

    class right_merges_at_the_end:
        """Attend to all tiles first, and merge their parts afterwards."""

        class PagedAttention:
            def _attend(self, slot_mapping, batches, layer, q, k, v):
                self._kv_cache.write(layer, slot_mapping, k, v)
                out = torch.empty_like(q)
                for tokens, tiles in batches:
                    grouped = q[tokens].unflatten(2, (k.shape[1], -1)).permute(0, 2, 3, 1, 4)
                    parts = []
                    for tile in tiles:
                        keys, values = self._kv_cache.read(layer, tile.blocks)
                        is_hidden = ~(tile.keys <= tile.queries)
                        part = attend_part(grouped[tile.rows], keys.transpose(1, 2), values.transpose(1, 2), is_hidden)
                        parts.append((tile.rows, part))
                    whole = parts[0][1]
                    for rows, part in parts[1:]:
                        merged = merge_attn_states(Part(whole.out[rows], whole.lse[rows]), part)
                        whole = Part(
                            whole.out.index_copy(0, rows, merged.out), whole.lse.index_copy(0, rows, merged.lse)
                        )
                    out[tokens] = whole.out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
                return out

    class wrong_keeps_the_last_tile:
        """Each tile replaces the result of those before it."""

        red = "sequence 0 of 1 computes tokens 0 to 6: attention of token"

        class PagedAttention:
            def _attend(self, slot_mapping, batches, layer, q, k, v):
                self._kv_cache.write(layer, slot_mapping, k, v)
                out = torch.empty_like(q)
                for tokens, tiles in batches:
                    grouped = q[tokens].unflatten(2, (k.shape[1], -1)).permute(0, 2, 3, 1, 4)
                    whole = None
                    for tile in tiles:
                        keys, values = (x.transpose(1, 2) for x in self._kv_cache.read(layer, tile.blocks))
                        part = attend_part(grouped[tile.rows], keys, values, tile.keys > tile.queries)
                        if whole is None:
                            whole = part
                        else:
                            whole.out[tile.rows], whole.lse[tile.rows] = part
                    out[tokens] = whole.out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
                return out

    class wrong_never_writes:
        """The step's own keys and values go nowhere."""

        red = "the keys and values of token 0 are not in block 2, offset 0"

        class PagedAttention:
            def _attend(self, slot_mapping, batches, layer, q, k, v):
                out = torch.empty_like(q)
                for tokens, tiles in batches:
                    grouped = q[tokens].unflatten(2, (k.shape[1], -1)).permute(0, 2, 3, 1, 4)
                    whole = None
                    for tile in tiles:
                        keys, values = (x.transpose(1, 2) for x in self._kv_cache.read(layer, tile.blocks))
                        part = attend_part(grouped[tile.rows], keys, values, tile.keys > tile.queries)
                        if whole is None:
                            whole = part
                        else:
                            merged = merge_attn_states(Part(whole.out[tile.rows], whole.lse[tile.rows]), part)
                            whole.out[tile.rows], whole.lse[tile.rows] = merged
                    out[tokens] = whole.out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
                return out

    class wrong_rounds_each_part:
        """Each part is rounded to the dtype of q before it is merged."""

        red = "of the numbers are those of float32, rounded once"
        unseen = "the model computes in float32"

        class PagedAttention:
            def _attend(self, slot_mapping, batches, layer, q, k, v):
                self._kv_cache.write(layer, slot_mapping, k, v)
                out = torch.empty_like(q)
                for tokens, tiles in batches:
                    grouped = q[tokens].unflatten(2, (k.shape[1], -1)).permute(0, 2, 3, 1, 4)
                    whole = None
                    for tile in tiles:
                        keys, values = (x.transpose(1, 2) for x in self._kv_cache.read(layer, tile.blocks))
                        part = attend_part(grouped[tile.rows], keys, values, tile.keys > tile.queries)
                        part = Part(part.out.to(q.dtype).float(), part.lse)
                        if whole is None:
                            whole = part
                        else:
                            merged = merge_attn_states(Part(whole.out[tile.rows], whole.lse[tile.rows]), part)
                            whole.out[tile.rows], whole.lse[tile.rows] = merged
                    out[tokens] = whole.out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
                return out

    class wrong_hides_the_token_itself:
        """A token does not see its own key."""

        red = "sequence 0 of 1 decodes token 0: attention of token 0"

        class PagedAttention:
            def _attend(self, slot_mapping, batches, layer, q, k, v):
                self._kv_cache.write(layer, slot_mapping, k, v)
                out = torch.empty_like(q)
                for tokens, tiles in batches:
                    grouped = q[tokens].unflatten(2, (k.shape[1], -1)).permute(0, 2, 3, 1, 4)
                    whole = None
                    for tile in tiles:
                        keys, values = (x.transpose(1, 2) for x in self._kv_cache.read(layer, tile.blocks))
                        part = attend_part(grouped[tile.rows], keys, values, tile.keys >= tile.queries)
                        if whole is None:
                            whole = part
                        else:
                            merged = merge_attn_states(Part(whole.out[tile.rows], whole.lse[tile.rows]), part)
                            whole.out[tile.rows], whole.lse[tile.rows] = merged
                    out[tokens] = whole.out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
                return out

    class wrong_merges_rows_that_a_tile_does_not_have:
        """The rows of a short sequence are missing from later tiles."""

        red = "RuntimeError: The size of tensor a"

        class PagedAttention:
            def _attend(self, slot_mapping, batches, layer, q, k, v):
                self._kv_cache.write(layer, slot_mapping, k, v)
                out = torch.empty_like(q)
                for tokens, tiles in batches:
                    grouped = q[tokens].unflatten(2, (k.shape[1], -1)).permute(0, 2, 3, 1, 4)
                    whole = None
                    for tile in tiles:
                        keys, values = (x.transpose(1, 2) for x in self._kv_cache.read(layer, tile.blocks))
                        part = attend_part(grouped[tile.rows], keys, values, tile.keys > tile.queries)
                        whole = part if whole is None else merge_attn_states(whole, part)
                    out[tokens] = whole.out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
                return out

    class wrong_loops_over_the_rows:
        """The tokens are right, but each row is attended to in operations of its own."""

        red = "an operation is done once per sequence"
        unseen = "the tokens are right: it is only slower"

        class PagedAttention:
            def _attend(self, slot_mapping, batches, layer, q, k, v):
                self._kv_cache.write(layer, slot_mapping, k, v)
                out = torch.empty_like(q)
                for tokens, tiles in batches:
                    grouped = q[tokens].unflatten(2, (k.shape[1], -1)).permute(0, 2, 3, 1, 4)
                    whole = None
                    for tile in tiles:
                        keys, values = (x.transpose(1, 2) for x in self._kv_cache.read(layer, tile.blocks))
                        is_hidden = tile.keys > tile.queries
                        parts = [
                            attend_part(
                                grouped[row : row + 1], keys[i : i + 1], values[i : i + 1], is_hidden[i : i + 1]
                            )
                            for i, row in enumerate(tile.rows.tolist())
                        ]
                        part = Part(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
                        if whole is None:
                            whole = part
                        else:
                            merged = merge_attn_states(Part(whole.out[tile.rows], whole.lse[tile.rows]), part)
                            whole.out[tile.rows], whole.lse[tile.rows] = merged
                    out[tokens] = whole.out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
                return out
