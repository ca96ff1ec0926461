/*
 * Finds reads of memory that was not written since the caching allocator handed it out.
 *
 * There is a node for each block with such bytes, which goes with the last of them, so a program
 * that writes what it allocates has hardly any. A bit for each byte of the block is set when it is
 * written; the bits are allocated at the first write that leaves some of the block unwritten.
 *
 * As everywhere in the sanitizer, the order is that of the calls: a write counts from its call on,
 * on any stream. What is unknown counts as written: blocks from before, what tasks allocate, the
 * bytes of a partial access, and an access of more than PIECES pieces.
 *
 * All under orSanitizerMutex.
 */
#include <stdlib.h>
#include <string.h>

#include "sanitizer/private.h"

enum { PIECES = 1 << 20 };

typedef struct orFresh {
  orTreeNode node; /* first, as in orShadow */
  const char *operation;
  orStack *stack; /* of the allocation; a reference, or null */
  orStream_t stream;
  uint64_t moment;
  uint64_t *bits; /* 1: written; null: none is */
  size_t left;    /* that are fresh */
} orFresh;

static orTree tree = OR_TREE_INITIALIZER;

static void erase(orFresh *fresh) {
  orTreeRemove(&tree, &fresh->node);
  orStackRelease(fresh->stack);
  free(fresh->bits);
  free(fresh);
}

void orFreshForget(uintptr_t begin, uintptr_t end) {
  for (orTreeNode *node; (node = orTreeFind(&tree, begin, end));) erase((orFresh *)node);
}

void orFreshAdd(uintptr_t begin, size_t bytes, orStream_t stream, orStack *stack) {
  orFreshForget(begin, begin + bytes);
  orFresh *fresh = orSanitizerAllocate(sizeof *fresh);
  *fresh = (orFresh){.operation = orSanitizerName("allocation"),
                     .stack = orStackRetain(stack),
                     .stream = stream,
                     .moment = orSanitizerMoment(),
                     .left = bytes};
  orTreeInsert(&tree, &fresh->node, begin, begin + bytes);
}

/* ---- bits ---- */

static uint64_t maskOf(size_t first, size_t last) {
  uint64_t count = last - first;
  return (count == 64 ? UINT64_MAX : ((uint64_t)1 << count) - 1) << first;
}

/* For bits [from, to) a word at a time; ends early if `look` returns false. */
static bool eachWord(orFresh *fresh, size_t from, size_t to,
                     bool (*look)(orFresh *fresh, uint64_t *word, uint64_t mask)) {
  while (from < to) {
    size_t first = from % 64, last = to - from < 64 - first ? first + (to - from) : 64;
    if (!look(fresh, &fresh->bits[from / 64], maskOf(first, last))) return false;
    from += last - first;
  }
  return true;
}

static bool isWritten(orFresh *fresh, uint64_t *word, uint64_t mask) {
  (void)fresh;
  return (*word & mask) == mask;
}

static bool setWritten(orFresh *fresh, uint64_t *word, uint64_t mask) {
  fresh->left -= (size_t)__builtin_popcountll(mask & ~*word);
  *word |= mask;
  return true;
}

/* ---- pieces ---- */

typedef struct orPieces {
  orFresh *fresh;
  bool (*visit)(orFresh *fresh, uintptr_t begin, uintptr_t end); /* of the block; false: enough */
} orPieces;

static bool eachPiece(orPieces *p, const orRange *range, uint32_t dims, uintptr_t at) {
  const orTreeNode *block = &p->fresh->node;
  if (dims) {
    const orRepeat *repeat = &range->repeats[dims - 1];
    for (size_t i = 0; i < repeat->count; i++)
      if (!eachPiece(p, range, dims - 1, at + i * repeat->stride)) return false;
    return true;
  }
  uintptr_t end = at + range->width;
  uintptr_t from = at > block->begin ? at : block->begin, to = end < block->end ? end : block->end;
  return from >= to || p->visit(p->fresh, from, to);
}

/* True if it has come to the end. */
static bool eachPieceOf(orFresh *fresh, const orRange *range,
                        bool (*visit)(orFresh *fresh, uintptr_t begin, uintptr_t end)) {
  orPieces pieces = {fresh, visit};
  return eachPiece(&pieces, range, range->dims, range->begin);
}

static bool writePiece(orFresh *fresh, uintptr_t begin, uintptr_t end) {
  eachWord(fresh, begin - fresh->node.begin, end - fresh->node.begin, setWritten);
  return fresh->left != 0;
}

static bool readPiece(orFresh *fresh, uintptr_t begin, uintptr_t end) {
  return fresh->bits &&
         eachWord(fresh, begin - fresh->node.begin, end - fresh->node.begin, isWritten);
}

static size_t countOf(const orRange *range) {
  size_t count = 1;
  for (uint32_t i = 0; i < range->dims; i++)
    if (__builtin_mul_overflow(count, range->repeats[i].count, &count)) return SIZE_MAX;
  return count;
}

/* ---- accesses ---- */

static bool isWhole(const orRange *range, const orTreeNode *block) {
  return !range->dims && range->begin <= block->begin && range->end >= block->end;
}

static bool makeBits(orFresh *fresh) {
  size_t bytes = fresh->node.end - fresh->node.begin;
  if (!fresh->bits) fresh->bits = calloc((bytes + 63) / 64, sizeof *fresh->bits);
  return fresh->bits;
}

/* Without memory for its bits nothing is reported of the block any more. */
static bool write(orFresh *fresh, const orRange *range) {
  bool known = !isWhole(range, &fresh->node) && makeBits(fresh);
  if (known) eachPieceOf(fresh, range, writePiece);
  if (!known || !fresh->left) erase(fresh);
  return true;
}

static bool read(orFresh *fresh, const orRange *range) {
  return eachPieceOf(fresh, range, readPiece);
}

/* The blocks that overlap [begin, end), which `visit` may erase. The one for which it returns
 * false; null: none. */
static orFresh *eachBlock(const orRange *range, uintptr_t begin, uintptr_t end,
                          bool (*visit)(orFresh *fresh, const orRange *range)) {
  orFresh *fresh = begin < end ? (orFresh *)orTreeFind(&tree, begin, end) : NULL;
  if (!fresh) return NULL;
  uintptr_t from = fresh->node.begin, to = fresh->node.end;
  if (!visit(fresh, range)) return fresh;
  fresh = eachBlock(range, begin, from, visit);
  return fresh ? fresh : eachBlock(range, to, end, visit);
}

void orFreshWrite(const orRange *range, bool partial) {
  if (OR_LIKELY(!tree.root)) return;
  bool hull = partial || countOf(range) > PIECES;
  orRange all = {.begin = range->begin, .end = range->end, .width = range->end - range->begin};
  eachBlock(hull ? &all : range, range->begin, range->end, write);
}

static void writeBytes(uintptr_t begin, uintptr_t end) {
  if (begin < end)
    orFreshWrite(&(orRange){.begin = begin, .end = end, .width = end - begin}, false);
}

/* A range lies in one block. */
void orFreshMove(const orRange *from, const orRange *to) {
  if (OR_LIKELY(!tree.root)) return;
  const orFresh *fresh = (orFresh *)orTreeFind(&tree, from->begin, from->end);
  if (!fresh || from->dims || to->dims || from->width != to->width) {
    orFreshWrite(to, false);
    return;
  }
  uintptr_t done = from->begin, distance = to->begin - from->begin; /* it may wrap */
  for (uintptr_t at = from->begin; at < from->end; at++) {
    size_t bit = at - fresh->node.begin;
    bool inside = at >= fresh->node.begin && at < fresh->node.end;
    if (!inside || (fresh->bits && fresh->bits[bit / 64] >> bit % 64 & 1)) continue;
    writeBytes(done + distance, at + distance);
    done = at + 1;
  }
  writeBytes(done + distance, to->end);
}

bool orFreshRead(const orRange *range, bool partial, orShadow *allocation) {
  if (OR_LIKELY(!tree.root) || partial || range->hull || countOf(range) > PIECES) return false;
  const orFresh *fresh = eachBlock(range, range->begin, range->end, read);
  if (!fresh) return false;
  *allocation = (orShadow){.operation = fresh->operation,
                           .stack = fresh->stack,
                           .stream = fresh->stream,
                           .sequence = fresh->moment,
                           .timeline = orTimelineOf(fresh->stream),
                           .range = {.begin = fresh->node.begin, .end = fresh->node.end}};
  return true;
}
