/*
 * The tree of intervals: a treap. Random priorities, a parent's never less than its children's,
 * give it the shape of random insertion whatever the order of addresses, so no rebalancing is
 * needed. Each node has the greatest end below it, by which a search skips subtrees that end too
 * early.
 */
#include "base/interval_tree.h"

#include <stdbool.h>
#include <stddef.h>

static bool isBefore(const orTreeNode *a, const orTreeNode *b) {
  return a->begin != b->begin ? a->begin < b->begin : a < b;
}

static void update(orTreeNode *n) {
  n->most = n->end;
  if (n->left && n->left->most > n->most) n->most = n->left->most;
  if (n->right && n->right->most > n->most) n->most = n->right->most;
}

/* Splits a tree into the nodes before `at` and the others. */
static void split(orTreeNode *n, const orTreeNode *at, orTreeNode **before, orTreeNode **rest) {
  if (!n) {
    *before = *rest = NULL;
  } else if (isBefore(n, at)) {
    split(n->right, at, &n->right, rest);
    update(*before = n);
  } else {
    split(n->left, at, before, &n->left);
    update(*rest = n);
  }
}

static orTreeNode *join(orTreeNode *a, orTreeNode *b) {
  if (!a || !b) return a ? a : b;
  orTreeNode *top = a->priority > b->priority ? a : b;
  if (top == a)
    a->right = join(a->right, b);
  else
    b->left = join(a, b->left);
  update(top);
  return top;
}

static orTreeNode **childToward(orTreeNode *n, const orTreeNode *node) {
  return isBefore(node, n) ? &n->left : &n->right;
}

/* A xorshift generator makes the priorities. */
void orTreeInsert(orTree *tree, orTreeNode *node, uintptr_t begin, uintptr_t end) {
  orTreeNode **at = &tree->root;
  tree->priority ^= tree->priority << 13;
  tree->priority ^= tree->priority >> 17;
  tree->priority ^= tree->priority << 5;
  *node = (orTreeNode){.begin = begin, .end = end, .priority = tree->priority};
  for (; *at && (*at)->priority >= node->priority; at = childToward(*at, node))
    if ((*at)->most < end) (*at)->most = end;
  split(*at, node, &node->left, &node->right);
  update(*at = node);
}

static void removeBelow(orTreeNode **at, const orTreeNode *node) {
  if (*at == node) {
    *at = join(node->left, node->right);
  } else {
    removeBelow(childToward(*at, node), node);
    update(*at);
  }
}

void orTreeRemove(orTree *tree, orTreeNode *node) { removeBelow(&tree->root, node); }

/* If a node ends too early, and one to its left ends after `begin`, the left one overlaps: it
 * begins no later, and so before `end`. */
orTreeNode *orTreeFind(const orTree *tree, uintptr_t begin, uintptr_t end) {
  orTreeNode *n = tree->root;
  while (n && n->most > begin && (n->begin >= end || n->end <= begin))
    n = n->begin >= end || (n->left && n->left->most > begin) ? n->left : n->right;
  return n && n->most > begin ? n : NULL;
}

static void eachBelow(orTreeNode *n, uintptr_t begin, uintptr_t end, void (*fn)(orTreeNode *node)) {
  for (; n && n->most > begin; n = n->right) {
    if (n->left && n->left->most > begin) eachBelow(n->left, begin, end, fn);
    if (n->begin >= end) return;
    if (n->end > begin) fn(n);
  }
}

void orTreeEach(const orTree *tree, uintptr_t begin, uintptr_t end, void (*fn)(orTreeNode *node)) {
  eachBelow(tree->root, begin, end, fn);
}
