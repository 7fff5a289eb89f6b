"""The two kernels that drafts from outside add to a step of vLLM's."""

from __future__ import annotations

from vllm.triton_utils import tl, triton


@triton.jit
def accept_kernel(sampled_ptr, sampled_stride, num_sampled_ptr, drawn_ptr, drafted_ptr, starts_ptr):
    """One program for each request, whose rows begin at `starts`. What is drawn at a row is the token after it; what
    was drafted there is the input of the next row. Writes the draws up to the first that was not drafted."""
    request = tl.program_id(0)
    start = tl.load(starts_ptr + request)
    num_drafted = tl.load(starts_ptr + request + 1) - start - 1
    count = 0
    right = True
    for i in range(num_drafted + 1):
        if right:
            token = tl.load(drawn_ptr + start + i)
            tl.store(sampled_ptr + request * sampled_stride + i, token)
            count += 1
            if i < num_drafted:
                right = token == tl.load(drafted_ptr + start + i + 1)
    tl.store(num_sampled_ptr + request, count)


@triton.jit
def follow_kernel(
    drafted_ptr,
    drafted_stride,
    chains_ptr,
    chains_stride,
    tokens_ptr,
    tokens_stride,
    total_len_ptr,
    COUNT: tl.constexpr,
):
    """One program for each chain: the request's place, the chain's first position, its length, its tokens. Writes the
    `COUNT` tokens that it has after the committed ones. Where it has none any will do: they are compared with draws."""
    row = chains_ptr + tl.program_id(0) * chains_stride
    place = tl.load(row).to(tl.int64)
    first = tl.load(row + 1)
    length = tl.load(row + 2)
    done = tl.load(total_len_ptr + place) - first
    right = (done >= 0) & (done < length)
    for i in range(tl.maximum(tl.minimum(done, length), 0)):
        right = right & (tl.load(tokens_ptr + place * tokens_stride + first + i) == tl.load(row + 3 + i))
    for i in range(COUNT):
        token = tl.load(row + 3 + done + i, mask=right & (done + i < length), other=0)
        tl.store(drafted_ptr + place * drafted_stride + i, token.to(tl.int64))
