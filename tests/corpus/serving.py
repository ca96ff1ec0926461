"""Serving: KV caches, schedulers, samplers"""

import torch
from torch.openreg import Event, Stream

from ._base import bug, full, here, pinned


def cache(blocks=4, width=16):
    return torch.zeros(blocks, width, device="openreg")


@bug
def sampled_tokens_read_early(right):
    """vLLM-like engines: the sampled tokens come without blocking, and the scheduler detokenises
    before the copy's event."""
    logits = torch.eye(4, 64, device="openreg")
    tokens = torch.full((4,), 9).pin_memory()
    tokens.copy_(logits.argmax(1), non_blocking=True)
    copied = here().record_event()
    if right:
        copied.synchronize()
    return tokens.tolist()


@bug
def block_swapped_out_and_reused(right):
    """Engines that swap: a block is given to a new sequence while its content is still swapped
    out."""
    swap, kv, host = Stream(), cache(), pinned(0, 16)
    kv[1].fill_(3)
    swap.wait_stream(here())
    with swap:
        host.copy_(kv[1], non_blocking=True)
    if right:
        here().wait_stream(swap)
    kv[1].fill_(8)  # the new sequence
    here().wait_stream(swap)
    swap.synchronize()
    return host + 0


@bug
def block_swapped_in_and_read(right):
    """Engines that swap: attention reads a block whose way back in is queued elsewhere."""
    swap, kv, host = Stream(), cache(), pinned(3, 16)
    swap.wait_stream(here())
    with swap:
        kv[2].copy_(host, non_blocking=True)
    if right:
        here().wait_stream(swap)
    result = (kv * 2).sum()
    here().wait_stream(swap)
    return result


@bug
def fork_copies_after_the_append(right):
    """Beam search with copy on write: a block is copied for the second beam on a stream, and the
    first beam appends to the original."""
    copies, kv = Stream(), cache()
    kv[0].fill_(1)
    copies.wait_stream(here())
    with copies:
        kv[3].copy_(kv[0])
    if right:
        here().wait_stream(copies)
    kv[0, 8:].fill_(7)
    here().wait_stream(copies)
    return kv[3] * 1


@bug
def slot_mapping_of_the_next_step(right):
    """vLLM-like engines: one pinned slot mapping for all steps, which the scheduler fills for the
    next step while this step's copy is queued."""
    mapping, kv = torch.zeros(4, dtype=torch.int64).pin_memory(), cache()
    for step in range(2):
        mapping.fill_(step)
        rows = mapping.to("openreg", non_blocking=True)
        kv.index_copy_(0, rows[:1], full(step + 1, 16).reshape(1, 16))
        if right:
            here().synchronize()
    return kv


@bug
def prefill_sent_before_it_is_written(right):
    """Split prefill and decode: the cache of a layer goes to the decoder's device on a stream that
    does not wait for the layer."""
    transfer, kv = Stream(), cache()
    there = torch.zeros(16, device="openreg:1")
    transfer.wait_stream(here(1))
    transfer.wait_stream(here())
    kv[0].fill_(5)
    if right:
        transfer.wait_stream(here())
    with transfer:
        there.copy_(kv[0], non_blocking=True)
    here(1).wait_stream(transfer)
    here().wait_stream(transfer)
    return there * 1


@bug
def one_event_for_all_layers(right):
    """Cache offloading by layers: one event is recorded again for each layer, so that the wait for
    layer 0 comes before its record or is for another layer's."""
    store, kv, host = Stream(), cache(2), pinned(0, 16)
    events = [Event(), Event()] if right else [Event()] * 2
    events[1].record()
    kv[0].fill_(1)
    if right:
        events[0].record()
    store.wait_event(events[0])
    with store:
        host.copy_(kv[0], non_blocking=True)
    events[0].record()
    store.synchronize()
    return host + 0


@bug
def input_ids_of_the_next_step(right):
    """Engines with persistent input buffers (static for graphs): the next step's ids are copied in
    on the scheduler's stream while the model reads this step's."""
    scheduler, ids, found = Stream(), torch.zeros(8, dtype=torch.int64, device="openreg"), []
    table = torch.arange(32.0, device="openreg").reshape(16, 2)
    scheduler.wait_stream(here())
    for step in range(2):
        host = torch.full((8,), step).pin_memory()
        if right:
            scheduler.wait_stream(here())
        with scheduler:
            ids.copy_(host, non_blocking=True)
        here().wait_stream(scheduler)
        found.append(torch.nn.functional.embedding(ids, table))
    return found


@bug
def adapter_replaced_in_its_slot(right):
    """LoRA serving: an adapter is loaded into the slot of one that a running batch still uses."""
    load, slots, x = Stream(), torch.ones(2, 16, 16, device="openreg"), torch.ones(4, 16)
    x = x.to("openreg")
    y = x @ slots[1]
    adapter = torch.full((16, 16), 5.0).pin_memory()
    if right:
        load.wait_stream(here())
    with load:
        slots[1].copy_(adapter, non_blocking=True)
    here().wait_stream(load)
    return y, slots.sum()


@bug
def temperature_in_place(right):
    """Samplers with log-probabilities on a stream of their own: the logits are scaled in place
    meanwhile."""
    side = Stream()
    logits = torch.arange(64.0, device="openreg").reshape(4, 16)
    side.wait_stream(here())
    with side:
        chosen = logits.max(1).values
    if right:
        here().wait_stream(side)
    logits.div_(2)
    here().wait_stream(side)
    chosen.record_stream(here())
    return chosen + logits[:, 0]


@bug
def draft_not_waited_for(right):
    """Speculative decoding: the target model verifies proposals that the draft model's stream has
    not written yet."""
    draft, proposals = Stream(), torch.zeros(4, dtype=torch.int64, device="openreg")
    draft.wait_stream(here())
    with draft:
        proposals.copy_(torch.eye(4, 8, device="openreg").argmax(1))
    if right:
        here().wait_stream(draft)
    accepted = (proposals == torch.arange(4, device="openreg")).sum()
    here().wait_stream(draft)
    return accepted


@bug
def lengths_advanced_too_early(right):
    """Engines that build attention metadata beside the model: lengths are advanced in place while
    the metadata is computed from them."""
    side, lengths = Stream(), torch.full((4,), 5, device="openreg")
    side.wait_stream(here())
    with side:
        starts = lengths.cumsum(0)
    if right:
        here().wait_stream(side)
    lengths.add_(1)
    here().wait_stream(side)
    starts.record_stream(here())
    return starts + 0


@bug
def counts_for_penalties(right):
    """Samplers with repetition penalties: counts of tokens are scattered on one stream and read on
    another; only the host knows which rows."""
    side, counts = Stream(), torch.zeros(8, 16, device="openreg")
    rows = torch.tensor([1, 2], device="openreg")
    side.wait_stream(here())
    with side:
        counts.index_add_(0, rows, torch.ones(2, 16, device="openreg"))
    if right:
        here().wait_stream(side)
    penalties = counts[1:2] * 2
    here().wait_stream(side)
    return penalties


@bug
def prefix_hit_before_it_is_filled(right):
    """Prefix caching: a request hits a block by its hash while the prefill that fills it is queued
    on another stream."""
    streams, kv, blocks = [Stream(), Stream()], cache(), {}
    found = []
    for stream in streams:
        stream.wait_stream(here())
        with stream:
            if "hash" not in blocks:
                kv[2].fill_(4)
                blocks["hash"] = (kv[2], stream.record_event())
            block, filled = blocks["hash"]
            if right:
                stream.wait_event(filled)
            found.append(block + 1)
    for stream, tensor in zip(streams, found, strict=True):
        here().wait_stream(stream)
        tensor.record_stream(here())
    return [tensor + 0 for tensor in found]


@bug
def grammar_mask_in_one_buffer(right):
    """Constrained decoding: the bit mask of each step is written by the host into one pinned
    buffer, in front of a copy on the sampler's stream that nobody has waited for."""
    sampler, mask = Stream(), pinned(0, 16)
    logits = torch.arange(16.0, device="openreg")
    sampler.wait_stream(here())
    found = []
    for step in range(2):
        mask.fill_(step)
        with sampler:
            found.append(logits + mask.to("openreg", non_blocking=True))
        (sampler if right else here()).synchronize()
    here().wait_stream(sampler)
    for tensor in found:
        tensor.record_stream(here())
    return [tensor * 1 for tensor in found]


@bug
def defragmented_while_attending(right):
    """Block managers that move blocks together: the move overlaps the attention that still uses the
    old block table."""
    mover, kv = Stream(), cache()
    kv[0].fill_(1), kv[3].fill_(3)
    table = torch.tensor([0, 3], device="openreg")
    attended = kv[table].sum(0)
    if right:
        mover.wait_stream(here())
    with mover:
        kv[3].zero_()
    here().wait_stream(mover)
    return attended
