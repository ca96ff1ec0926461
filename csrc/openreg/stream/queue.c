/*
 * A stream's queue of tasks: records of any size, their arguments inline, in a list of chunks.
 *
 * Producers append under the stream's lock; the one worker that runs the stream consumes without
 * it. The stream's `queued` count publishes a record: it is stored with release after orQueueCommit
 * and loaded with acquire before orQueueFront. A consumer never reads a record, a chunk's `end` or
 * its `next` that the count it has loaded does not cover. A reservation may be abandoned: a chunk
 * is linked with the first record committed to it, so that none in the list is empty. Until then it
 * is the spare chunk, which is also where an emptied chunk is kept for reuse: a stream in a steady
 * state allocates nothing.
 *
 * model/queue.cpp is a model of the queue (`make model`): change them together.
 */
#include <stdlib.h>

#include "stream/stream.h"

enum { OR_CHUNK_BYTES = 64 << 10 };

struct orChunk {
  orChunk *next;
  size_t capacity;
  _Atomic size_t end; /* bytes of committed records */
  _Alignas(16) char data[];
};

/* Makes `spare` a chunk with room for `need` bytes. */
static bool makeSpare(orQueueIn *in, size_t need) {
  if (in->spare && in->spare->capacity >= need) return true;
  size_t capacity = need > OR_CHUNK_BYTES ? need : OR_CHUNK_BYTES;
  orChunk *c = malloc(sizeof *c + capacity);
  if (!c) return false;
  c->capacity = capacity;
  free(in->spare);
  in->spare = c;
  return true;
}

static size_t endOf(const orChunk *c) {
  return atomic_load_explicit(&c->end, memory_order_relaxed);
}

orTask *orQueueReserve(orQueueIn *in, size_t args_size) {
  size_t size = OR_TASK_HEADER + ((args_size + 15) & ~(size_t)15);
  const orChunk *tail = in->tail;
  bool fits = tail && tail->capacity - endOf(tail) >= size;
  if (!fits && !makeSpare(in, size)) return NULL;
  orTask *task = (orTask *)(fits ? in->tail->data + endOf(tail) : in->spare->data);
  *task = (orTask){.size = size};
  return task;
}

static void linkSpare(orQueueIn *in, orQueueOut *out) {
  orChunk *c = in->spare;
  in->spare = NULL;
  c->next = NULL;
  atomic_init(&c->end, 0);
  if (in->tail)
    in->tail->next = c;
  else
    out->head = c; /* the first task: no worker has read `out` yet */
  in->tail = c;
}

void orQueueCommit(orQueueIn *in, orQueueOut *out, const orTask *task) {
  if (in->spare && (const char *)task == in->spare->data) linkSpare(in, out);
  orChunk *tail = in->tail;
  size_t end = endOf(tail);
  OR_ASSERT((const char *)task, ==, tail->data + end);
  atomic_store_explicit(&tail->end, end + task->size, memory_order_relaxed);
}

/* Only committed records are here, and are run. */
static orTask *recordAt(orChunk *c, size_t offset) {
  orTask *task = (orTask *)(c->data + offset);
  OR_ASSERT(offset, <, endOf(c));
  OR_ASSERT(task->size, >=, OR_TASK_HEADER);
  return task;
}

orTask *orQueueFront(orQueueOut *out, orChunk **emptied) {
  orChunk *c = out->head;
  *emptied = NULL;
  /* `end` only grows and includes every record here that the count covers. If they are equal, the
   * record is in the next chunk, whose link the count covers too. */
  if (out->offset == endOf(c)) {
    *emptied = c;
    out->head = c = c->next;
    out->offset = 0;
  }
  return recordAt(c, out->offset);
}

void orQueuePop(orQueueOut *out, size_t size) { out->offset += size; }

const orTask *orQueuePeek(const orQueueOut *out) {
  orChunk *c = out->head;
  return out->offset == endOf(c) ? recordAt(c->next, 0) : recordAt(c, out->offset);
}

void orQueueReuse(orQueueIn *in, orChunk *chunk) {
  if (!in->spare && chunk->capacity == OR_CHUNK_BYTES)
    in->spare = chunk;
  else
    free(chunk);
}

/* The record that was run last is in the last chunk. */
void orQueueClear(orQueueIn *in, orQueueOut *out) {
  OR_ASSERT(out->head, ==, in->tail);
  OR_ASSERT(in->tail ? endOf(in->tail) : 0, ==, out->offset);
  free(in->spare);
  free(in->tail);
  *in = (orQueueIn){0};
  *out = (orQueueOut){0};
}
