/*
 * A stream's queue of tasks: records of any size, their arguments inline, in a list of chunks.
 *
 * Producers append under the stream's lock; the one lane that runs the stream consumes without it. What makes a
 * record visible is the stream's `queued` count, stored with release after orQueueCommit and loaded with acquire
 * before orQueueFront: a consumer never looks at a record, a chunk's `end` or its `next` that a count it has
 * seen does not cover. One emptied chunk is kept for the next lap, so that a stream in a steady state allocates
 * nothing.
 */
#include <stdlib.h>

#include "core.h"

enum { OR_CHUNK_BYTES = 64 << 10 };

struct orChunk {
  orChunk *next;
  size_t capacity;
  _Atomic size_t end; /* bytes of committed records */
  _Alignas(16) char data[];
};

static orChunk *newChunk(orQueueIn *in, size_t need) {
  orChunk *c = in->spare;
  if (c && c->capacity >= need) {
    in->spare = NULL;
  } else {
    size_t capacity = need > OR_CHUNK_BYTES ? need : OR_CHUNK_BYTES;
    c = malloc(sizeof *c + capacity);
    if (!c) return NULL;
    c->capacity = capacity;
  }
  c->next = NULL;
  atomic_init(&c->end, 0);
  return c;
}

orTask *orQueueReserve(orQueueIn *in, orQueueOut *out, size_t args_size) {
  size_t size = OR_TASK_HEADER + ((args_size + 15) & ~(size_t)15);
  orChunk *tail = in->tail;
  if (!tail || tail->capacity - atomic_load_explicit(&tail->end, memory_order_relaxed) < size) {
    orChunk *c = newChunk(in, size);
    if (!c) return NULL;
    if (tail)
      tail->next = c;
    else
      out->head = c; /* the very first task: no lane has looked yet */
    in->tail = tail = c;
  }
  orTask *task = (orTask *)(tail->data + atomic_load_explicit(&tail->end, memory_order_relaxed));
  *task = (orTask){.size = size};
  return task;
}

void orQueueCommit(orQueueIn *in, const orTask *task) {
  _Atomic size_t *end = &in->tail->end;
  atomic_store_explicit(end, atomic_load_explicit(end, memory_order_relaxed) + task->size,
                        memory_order_relaxed);
}

orTask *orQueueFront(orQueueOut *out, orChunk **emptied) {
  orChunk *c = out->head;
  *emptied = NULL;
  /* `end` only grows, and a record here that the count covers is already in it: equality means that the record
   * is in the next chunk, whose link the count covers as well. */
  if (out->offset == atomic_load_explicit(&c->end, memory_order_relaxed)) {
    *emptied = c;
    out->head = c = c->next;
    out->offset = 0;
  }
  return (orTask *)(c->data + out->offset);
}

void orQueuePop(orQueueOut *out, size_t size) { out->offset += size; }

void orQueueForEach(const orQueueOut *out, uint64_t count,
                    bool (*fn)(const orTask *task, uint64_t index, void *context), void *context) {
  const orChunk *c = out->head;
  size_t offset = out->offset;
  for (uint64_t i = 0; i < count; i++) {
    if (offset == atomic_load_explicit(&c->end, memory_order_relaxed)) {
      c = c->next;
      offset = 0;
    }
    const orTask *task = (const orTask *)(c->data + offset);
    if (!fn(task, i, context)) return;
    offset += task->size;
  }
}

void orQueueReuse(orQueueIn *in, orChunk *chunk) {
  if (!in->spare && chunk->capacity == OR_CHUNK_BYTES)
    in->spare = chunk;
  else
    free(chunk);
}
