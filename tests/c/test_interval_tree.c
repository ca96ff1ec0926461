/*
 * The core's tree of intervals against an array that is searched from end to end. The library does
 * not export the tree, so it is compiled into the tests.
 */
#include <stdlib.h>

#include "../../csrc/openreg/base/interval_tree.c"
#include "harness.h"

enum { NODES = 200, STEPS = 20000, SPAN = 300, MOST_DEPTH = 40 };

static orTree tree = OR_TREE_INITIALIZER;
static orTreeNode nodes[NODES];
static bool live[NODES];
static const orTreeNode *found[NODES];
static int foundCount;

static uintptr_t below(uintptr_t limit) {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (uintptr_t)(state >> 33) % limit;
}

static bool overlaps(int i, uintptr_t begin, uintptr_t end) {
  return live[i] && nodes[i].begin < end && nodes[i].end > begin;
}

static void note(orTreeNode *node) {
  ASSERT_LT(foundCount, NODES);
  found[foundCount++] = node;
}

/* The tree has found as many as the array, each of them overlaps, and none comes twice: they are
 * the same. */
static void compareWithin(uintptr_t begin, uintptr_t end) {
  int expected = 0;
  for (int i = 0; i < NODES; i++) expected += overlaps(i, begin, end);
  foundCount = 0;
  orTreeEach(&tree, begin, end, note);
  ASSERT_EQ(foundCount, expected);
  for (int i = 0; i < foundCount; i++) {
    ASSERT(overlaps((int)(found[i] - nodes), begin, end));
    if (i) ASSERT(isBefore(found[i - 1], found[i]));
  }
  const orTreeNode *any = orTreeFind(&tree, begin, end);
  ASSERT_EQ(!any, !expected);
  if (any) ASSERT(overlaps((int)(any - nodes), begin, end));
}

/* With a `widest` of 1 two intervals are equal or apart; with SPAN many contain others. */
static void changeAndCompare(uintptr_t widest) {
  int i = (int)below(NODES);
  uintptr_t begin = below(SPAN), from = below(SPAN);
  if (live[i])
    orTreeRemove(&tree, &nodes[i]);
  else
    orTreeInsert(&tree, &nodes[i], begin, begin + 1 + below(widest));
  live[i] = !live[i];
  compareWithin(from, from + 1);
  compareWithin(from, from + 1 + below(SPAN));
  compareWithin(0, UINTPTR_MAX);
}

TEST(interval_tree_finds_what_an_array_has) {
  const uintptr_t widest[] = {1, 4, SPAN};
  for (int round = 0; round < 3; round++)
    for (int step = 0; step < STEPS / 3; step++) changeAndCompare(widest[round]);
  for (int i = 0; i < NODES; i++)
    if (live[i]) orTreeRemove(&tree, &nodes[i]);
  ASSERT(!tree.root);
}

static int depthOf(const orTreeNode *n) {
  int left = n ? depthOf(n->left) : 0, right = n ? depthOf(n->right) : 0;
  return n ? 1 + (left > right ? left : right) : 0;
}

/* Equal begins, and then ascending ones, which would make a list of a tree without priorities. */
TEST(interval_tree_stays_balanced) {
  enum { MANY = 10000 };
  orTreeNode *many = calloc(MANY, sizeof *many);
  for (uintptr_t width = 0; width < 2; width++) {
    orTree ordered = OR_TREE_INITIALIZER;
    for (uintptr_t i = 0; i < MANY; i++) orTreeInsert(&ordered, &many[i], i * width, i * width + 1);
    ASSERT_LE(depthOf(ordered.root), MOST_DEPTH);
  }
  free(many);
}

/* The last byte of the address space is in no half-open interval. */
TEST(interval_tree_takes_the_ends_of_the_address_space) {
  orTree ends = OR_TREE_INITIALIZER;
  orTreeNode first, last;
  orTreeInsert(&ends, &first, 0, 1);
  orTreeInsert(&ends, &last, UINTPTR_MAX - 1, UINTPTR_MAX);
  ASSERT(orTreeFind(&ends, 0, 1) == &first);
  ASSERT(orTreeFind(&ends, UINTPTR_MAX - 1, UINTPTR_MAX) == &last);
  ASSERT(!orTreeFind(&ends, 1, UINTPTR_MAX - 1));
  ASSERT(!orTreeFind(&ends, UINTPTR_MAX, 0));
}
