/*
 * Free blocks of one stream and pool, by size: exact best fit in a number of steps bounded by the
 * bits of the size, however many blocks there are.
 *
 * Sizes are split into classes by their highest bit. Each class is a digital search tree: the node
 * at depth d has the ring of blocks of one size and splits the others by the bit d places below the
 * highest. There is no balancing; any size below a node may take its place.
 *
 * Of several free blocks of one size the newest is taken, so that memory just freed is reused next.
 * A task may not have what was freed after it was queued, so it searches from the oldest on.
 */
#include "cache/block.h"

/* How many sizes, and blocks of each, a task checks before it takes fresh memory. */
enum { OR_TASK_SIZES = 8, OR_TASK_BLOCKS = 4 };

static inline unsigned classOf(size_t size) {
  return 63 - (unsigned)__builtin_clzll(size / OR_BLOCK_UNIT);
}

/* The bit that a class's root splits by; its children split by half of it. */
static inline size_t firstBit(unsigned class) { return ((size_t)OR_BLOCK_UNIT << class) >> 1; }

static void treePlace(orBlock *block, orBlock **up) {
  block->up = up;
  *up = block;
}

static void treeReplace(orBlock *old, orBlock *block) {
  treePlace(block, old->up);
  for (int i = 0; i < 2; i++) {
    block->child[i] = old->child[i];
    if (block->child[i]) block->child[i]->up = &block->child[i];
  }
}

/* `newer` of the newest leads to the oldest, and `older` of the oldest to the newest. The tree has
 * the oldest. A block that a task freed is inserted at the old end, as it may be reused earlier
 * than blocks that the host freed before. */
static void ringInsert(orBlock *oldest, orBlock *block) {
  orBlock *older = block->reuse_from < oldest->older->reuse_from ? oldest : oldest->older;
  block->up = NULL;
  block->older = older;
  block->newer = older->newer;
  block->older->newer = block;
  block->newer->older = block;
}

void orBinsInsert(orBlockBins *bins, orBlock *block) {
  unsigned class = classOf(block->size);
  size_t bit = firstBit(class);
  orBlock **link = &bins->root[class];
  for (; *link && (*link)->size != block->size; bit >>= 1)
    link = &(*link)->child[(block->size & bit) != 0];
  block->child[0] = block->child[1] = NULL;
  if (*link) {
    ringInsert(*link, block);
    return;
  }
  block->older = block->newer = block;
  treePlace(block, link);
  bins->occupied |= UINT64_C(1) << class;
}

/* Any leaf below a node may take its place, as the bits that lead to both are the same. */
static void treeRemove(orBlockBins *bins, orBlock *block) {
  orBlock *leaf = block;
  while (leaf->child[0] || leaf->child[1]) leaf = leaf->child[leaf->child[0] == NULL];
  *leaf->up = NULL;
  if (leaf != block) {
    treeReplace(block, leaf);
    return;
  }
  unsigned class = classOf(block->size);
  if (!bins->root[class]) bins->occupied &= ~(UINT64_C(1) << class);
}

void orBinsRemove(orBlockBins *bins, orBlock *block) {
  orBlock *newer = block->newer;
  if (newer == block) {
    treeRemove(bins, block);
    return;
  }
  newer->older = block->older;
  block->older->newer = newer;
  if (block->up) treeReplace(block, newer);
}

static orBlock *smaller(orBlock *a, orBlock *b) { return !a || b->size < a->size ? b : a; }

static orBlock *treeMin(orBlock *node) {
  orBlock *best = node;
  for (; node; node = node->child[node->child[0] == NULL]) best = smaller(best, node);
  return best;
}

/* The oldest of the smallest blocks that are large enough. */
static orBlock *find(const orBlockBins *bins, size_t size) {
  unsigned class = classOf(size);
  orBlock *best = NULL, *above = NULL; /* the last subtree beside the path: all its sizes are
                                        * greater */
  size_t bit = firstBit(class);
  for (orBlock *node = bins->root[class]; node; bit >>= 1) {
    if (node->size == size) return node;
    if (node->size > size) best = smaller(best, node);
    bool one = (size & bit) != 0;
    if (!one && node->child[1]) above = node->child[1];
    node = node->child[one];
  }
  if (above) best = smaller(best, treeMin(above));
  if (best) return best;
  uint64_t greater = bins->occupied & ~((UINT64_C(2) << class) - 1);
  return greater ? treeMin(bins->root[__builtin_ctzll(greater)]) : NULL;
}

orBlock *orBinsBestFit(const orBlockBins *bins, size_t size, uint64_t task) {
  orBlock *oldest = find(bins, size);
  if (!oldest || task == OR_TASK_ANY) return oldest ? oldest->older : NULL;
  for (int i = 0; oldest && i < OR_TASK_SIZES; i++) {
    orBlock *block = oldest;
    for (int j = 0; j < OR_TASK_BLOCKS; j++, block = block->newer)
      if (block->reuse_from <= task) return block;
    oldest = find(bins, oldest->size + OR_BLOCK_UNIT);
  }
  return NULL;
}
