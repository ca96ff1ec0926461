/*
 * A balanced tree of address intervals [begin, end), ordered by begin. They may overlap, and begin
 * at the same address. The node is embedded in the structure that has the interval. A tree has no
 * lock of its own.
 */
#pragma once

#include <stdint.h>

typedef struct orTreeNode {
  struct orTreeNode *left, *right;
  uintptr_t begin, end;
  uintptr_t most; /* the greatest end of this node and of those below */
  uint32_t priority;
} orTreeNode;

typedef struct orTree {
  orTreeNode *root;
  uint32_t priority; /* of the node that was inserted last */
} orTree;

#define OR_TREE_INITIALIZER {.priority = 2463534242u}

/* The interval is not empty. */
void orTreeInsert(orTree *tree, orTreeNode *node, uintptr_t begin, uintptr_t end);
void orTreeRemove(orTree *tree, orTreeNode *node);
/* An interval that overlaps [begin, end), or null. */
orTreeNode *orTreeFind(const orTree *tree, uintptr_t begin, uintptr_t end);
/* Calls `fn`, which must not change the tree, for all that overlap [begin, end), in order. */
void orTreeEach(const orTree *tree, uintptr_t begin, uintptr_t end, void (*fn)(orTreeNode *node));
