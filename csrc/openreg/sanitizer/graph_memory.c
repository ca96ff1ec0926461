/*
 * What captured work uses: inputs, which are blocks outside of the graph's own pool, and outputs,
 * which are ranges of the pool that only a replay writes.
 *
 * Each is an interval of a tree, and belongs to a node of the capture, which acts at each replay in
 * the order of the calls and goes with the graph. A capture has one input for a block. The free of
 * an input is noted, also while the sanitizer is off, and reported at each later replay. All
 * outputs of a capture leave their tree when the first replay begins, as its own nodes use that
 * memory again and again; one leaves it earlier if other work writes there. Reading it before that
 * is reported.
 *
 * Blocks of any graph's pool are no inputs: the pool keeps their memory, whatever is freed. Their
 * latest reader in another capture is noted for orSanitizerInputs.
 *
 * All under orSanitizerMutex. A node's thread reads what is atomic without it.
 */
#include <stdlib.h>
#include <string.h>

#include "cache/cache.h"
#include "sanitizer/private.h"

typedef struct orGraphMemory {
  orTreeNode node;        /* first, as in orShadow */
  _Atomic(orTree *) tree; /* null: in none any more */
  uint64_t capture;
  uint64_t reader; /* of an output: the latest other capture that reads it */
  orShadow access; /* the first in the capture; with a reference to its stack */
  const char *name;
  orStack *freed_by;
  _Atomic bool freed, replaced, written; /* the last two since the last replay */
} orGraphMemory;

static orTree inputs = OR_TREE_INITIALIZER, outputs = OR_TREE_INITIALIZER;
static void onFrees(orProbe *p);
static orTool tool = {.on = {[OR_PROBE_BLOCK_FREES] = onFrees}};

__attribute__((constructor)) static void add(void) { orToolAdd(&tool); }

/* ---- the trees ---- */

static orTree *treeOf(orGraphMemory *memory) {
  return atomic_load_explicit(&memory->tree, memory_order_relaxed);
}

static void insert(orTree *tree, orGraphMemory *memory, uintptr_t begin, uintptr_t end) {
  orTreeInsert(tree, &memory->node, begin, end);
  atomic_store_explicit(&memory->tree, tree, memory_order_relaxed);
  if (tree == &inputs) orToolSwitch(&tool, true);
}

static void removeFrom(orTree *tree, orGraphMemory *memory) {
  orTreeRemove(tree, &memory->node);
  atomic_store_explicit(&memory->tree, NULL, memory_order_relaxed);
  if (!inputs.root) orToolSwitch(&tool, false);
}

/* `visit` of each that overlaps the bytes; it may not change the tree. */
static struct {
  void (*visit)(orGraphMemory *memory, void *context);
  void *context;
} visitor;

static void visitNode(orTreeNode *node) { visitor.visit((orGraphMemory *)node, visitor.context); }

static void each(const orTree *tree, uintptr_t begin, uintptr_t end,
                 void (*visit)(orGraphMemory *memory, void *context), void *context) {
  visitor.visit = visit;
  visitor.context = context;
  orTreeEach(tree, begin, end, visitNode);
}

/* ---- what belongs to one capture ---- */

typedef struct orGathered {
  uint64_t capture;
  orGraphMemory **list;
  size_t count, room;
} orGathered;

static void push(orGathered *all, orGraphMemory *memory) {
  if (all->count == all->room) {
    all->room = all->room ? all->room * 2 : 16;
    all->list = orSanitizerResize(all->list, all->room * sizeof *all->list);
  }
  all->list[all->count++] = memory;
}

static void gather(orGraphMemory *memory, void *context) {
  orGathered *all = context;
  if (memory->capture == all->capture) push(all, memory);
}

static void gatherRead(orGraphMemory *memory, void *context) {
  orGathered *all = context;
  if (memory->reader == all->capture) push(all, memory);
}

/* Lock held. */
static void forget(orTree *tree, uint64_t capture) {
  orGathered all = {.capture = capture};
  each(tree, 0, UINTPTR_MAX, gather, &all);
  for (size_t i = 0; i < all.count; i++) removeFrom(tree, all.list[i]);
  free(all.list);
}

/* ---- capture ---- */

static void destroy(void *args) {
  orGraphMemory *memory = *(orGraphMemory **)args;
  orSanitizerLock();
  if (treeOf(memory)) removeFrom(treeOf(memory), memory);
  orStackRelease(memory->access.stack);
  orStackRelease(memory->freed_by);
  orSanitizerUnlock();
  free(memory);
}

static void replay(const void *args, orStream_t on);
static const orNodeTool node_tool = {.report = replay, .destroy = destroy};

typedef struct orSought {
  uintptr_t begin;
  uint64_t capture;
  orGraphMemory *found;
} orSought;

static void compare(orGraphMemory *memory, void *context) {
  orSought *sought = context;
  if (memory->node.begin == sought->begin && memory->capture == sought->capture)
    sought->found = memory;
}

/* The capture's memory that begins there. Lock held. */
static orGraphMemory *find(const orTree *tree, uintptr_t begin, uint64_t capture) {
  orSought sought = {begin, capture, NULL};
  each(tree, begin, begin + 1, compare, &sought);
  return sought.found;
}

typedef struct orKeeping {
  orStream_t stream;
  uint64_t capture;
  const char *operation;
  bool has_stack;
  orSanitizerOptions by;
  orStack *stack; /* with a reference */
} orKeeping;

/* No lock held. */
static void captureStack(orKeeping *k) {
  void *captured = k->has_stack ? NULL : orStackCapture(&k->by);
  if (k->has_stack) return;
  orSanitizerLock();
  k->stack = orStackNew(captured, &k->by);
  orSanitizerUnlock();
  k->has_stack = true;
}

static bool isKnown(orTree *tree, uintptr_t begin, uintptr_t end, const orTouch *touch,
                    uint64_t capture) {
  orSanitizerLock();
  orGraphMemory *known = find(tree, begin, capture);
  if (known && tree == &inputs) known->access.write |= touch->write & OR_ACCESS_WRITES;
  bool all = known && known->node.end >= end;
  orSanitizerUnlock();
  return all;
}

static void noteReader(orGraphMemory *memory, void *context) {
  const orKeeping *k = context;
  if (memory->capture != k->capture) memory->reader = k->capture;
}

/* No lock held. */
static void keepRead(orKeeping *k, const orRange *range) {
  orSanitizerLock();
  each(&outputs, range->begin, range->end, noteReader, k);
  orSanitizerUnlock();
}

static void keepOne(orKeeping *k, const orTouch *touch) {
  orCacheFound block;
  bool writes = touch->write & OR_ACCESS_WRITES;
  if (touch->pinned || !orCacheFind((const void *)touch->range.begin, &block)) return;
  if (block.is_graphs && !writes) keepRead(k, &touch->range);
  if (block.is_graphs && (!writes || touch->write & OR_ACCESS_PARTIAL)) return;
  orTree *tree = block.is_graphs ? &outputs : &inputs;
  uintptr_t begin = block.is_graphs ? touch->range.begin : block.begin;
  uintptr_t end = block.is_graphs ? touch->range.end : block.begin + block.bytes;
  if (isKnown(tree, begin, end, touch, k->capture)) return;
  captureStack(k);
  orGraphMemory *memory = orSanitizerAllocate(sizeof *memory);
  *memory = (orGraphMemory){.capture = k->capture};
  memory->access = (orShadow){.operation = k->operation,
                              .stack = k->stack,
                              .stream = k->stream,
                              .range = touch->range,
                              .write = writes};
  orSanitizerLock();
  orStackRetain(k->stack);
  memory->access.sequence = orSanitizerMoment();
  memory->access.timeline = orTimelineOf(k->stream);
  insert(tree, memory, begin, end);
  orSanitizerUnlock();
  bool kept;
  orCaptureReport(k->stream, &node_tool, &memory, sizeof memory, &kept);
  if (!kept) destroy(&memory);
}

void orGraphMemoryKeep(orStream_t stream, const char *operation, const orTouch *touches,
                       size_t count) {
  orCaptureStatus status;
  orKeeping k = {.stream = stream, .operation = operation};
  if (orStreamGetCaptureInfo(stream, &status, &k.capture) || !k.capture) return;
  for (size_t i = 0; i < count; i++) keepOne(&k, &touches[i]);
  orSanitizerLock();
  orStackRelease(k.stack);
  orSanitizerUnlock();
}

/* ---- outputs ---- */

typedef struct orReading {
  const orRange *range;
  orShadow *written;
  bool found;
} orReading;

static void read(orGraphMemory *memory, void *context) {
  orReading *reading = context;
  if (reading->found || !orRangesMeet(&memory->access.range, reading->range)) return;
  *reading->written = memory->access;
  reading->found = true;
}

bool orGraphMemoryRead(const orRange *range, bool partial, orShadow *written) {
  orReading reading = {range, written, false};
  if (OR_LIKELY(!outputs.root) || partial) return false;
  each(&outputs, range->begin, range->end, read, &reading);
  return reading.found;
}

static void noteWrite(orGraphMemory *memory, void *context) {
  (void)context;
  memory->written = true;
}

/* Nothing more is reported of an output that other work has written in part. */
void orGraphMemoryWrite(const orRange *range) {
  if (inputs.root) each(&inputs, range->begin, range->end, noteWrite, NULL);
  if (OR_LIKELY(!outputs.root)) return;
  for (orTreeNode *node; (node = orTreeFind(&outputs, range->begin, range->end));)
    removeFrom(&outputs, (orGraphMemory *)node);
}

void orGraphMemoryForget(void) { orGraphMemoryWrite(&(orRange){.begin = 0, .end = UINTPTR_MAX}); }

/* ---- inputs ---- */

typedef struct orFreeing {
  uintptr_t begin;
  orStack *stack;
  bool found;
} orFreeing;

static void look(orGraphMemory *memory, void *context) {
  orFreeing *freeing = context;
  freeing->found |= memory->node.begin == freeing->begin && !memory->freed;
}

static void noteFree(orGraphMemory *memory, void *context) {
  orFreeing *freeing = context;
  if (memory->node.begin != freeing->begin || memory->freed) return;
  memory->freed_by = orStackRetain(freeing->stack);
  memory->freed = true;
}

/* The stack is captured only if there is something to note. */
static void onFrees(orProbe *p) {
  orSanitizerOptions by;
  orFreeing freeing = {.begin = (uintptr_t)p->dst};
  orSanitizerLock();
  each(&inputs, freeing.begin, freeing.begin + 1, look, &freeing);
  orSanitizerUnlock();
  if (!freeing.found) return;
  void *captured = orStackCapture(&by);
  orSanitizerLock();
  freeing.stack = orStackNew(captured, &by);
  each(&inputs, freeing.begin, freeing.begin + 1, noteFree, &freeing);
  orStackRelease(freeing.stack);
  orSanitizerUnlock();
}

/* `later` gets the input's range. No lock held. */
static void report(orReportKind kind, orGraphMemory *memory, orStream_t on, const char *operation,
                   orShadow later) {
  orRaceList list = {.first = NULL};
  orSanitizerLock();
  orShadow use = memory->access;
  use.stream = on;
  use.timeline = orTimelineOf(on);
  later.operation = orSanitizerName(operation);
  later.sequence = orSanitizerMoment();
  later.range = use.range;
  orRaceGraph(kind, &use, &later, &list)->name = memory->name;
  orSanitizerUnlock();
  orRacesReport(&list);
}

static void reportReplaced(orGraphMemory *memory, orStream_t on) {
  orSanitizerOptions by;
  void *captured = orStackCapture(&by);
  orSanitizerLock();
  orStack *stack = orStackNew(captured, &by);
  orSanitizerUnlock();
  report(orReportReplacedInput, memory, on, "replay", (orShadow){.stack = stack});
  orSanitizerLock();
  orStackRelease(stack);
  orSanitizerUnlock();
}

/* True if it is to be reported. What the graph itself writes afterwards counts as written. */
static bool takeReplaced(orGraphMemory *memory) {
  orSanitizerLock();
  bool replaced = memory->replaced && !memory->written && orSanitizerReportsPossible;
  memory->replaced = memory->written = false;
  orSanitizerUnlock();
  return replaced;
}

static void replay(const void *args, orStream_t on) {
  orGraphMemory *memory = *(orGraphMemory *const *)args;
  orTree *tree = treeOf(memory);
  if (!tree || !orSanitizerIsOn() || orSanitizerIgnores()) return;
  if (tree == &inputs) {
    if (OR_UNLIKELY(memory->freed))
      report(orReportFreedInput, memory, on, "free",
             (orShadow){.stack = memory->freed_by, .write = true});
    else if (OR_UNLIKELY(memory->replaced) || memory->written)
      if (takeReplaced(memory)) reportReplaced(memory, on);
    return;
  }
  orSanitizerLock();
  forget(&outputs, memory->capture);
  orSanitizerUnlock();
}

/* ---- for the owner of a capture ---- */

/* The inputs of the stream's capture, and outputs of others that it reads. They stay until it ends,
 * which is the caller's to do. */
static orError_t collectInputs(orStream_t stream, orGathered *all) {
  orCaptureStatus status;
  OR_TRY(orStreamGetCaptureInfo(stream, &status, &all->capture));
  if (!all->capture)
    return orFail(orErrorInvalidValue, "orSanitizerInputs: the stream is not capturing");
  orSanitizerLock();
  each(&inputs, 0, UINTPTR_MAX, gather, all);
  each(&outputs, 0, UINTPTR_MAX, gatherRead, all);
  orSanitizerUnlock();
  return orSuccess;
}

orError_t orSanitizerInputs(orStream_t stream,
                            void (*visit)(const void *begin, size_t bytes, char name[64],
                                          void *context),
                            void *context) {
  orGathered all = {.count = 0};
  if (!visit) return orFail(orErrorInvalidValue, "orSanitizerInputs: null function");
  OR_TRY(collectInputs(stream, &all));
  for (size_t i = 0; i < all.count; i++) {
    const orTreeNode *node = &all.list[i]->node;
    char name[64] = "";
    visit((const void *)node->begin, node->end - node->begin, name, context);
    orSanitizerLock();
    if (*name) all.list[i]->name = orSanitizerName(name);
    orSanitizerUnlock();
  }
  free(all.list);
  return orSuccess;
}

orError_t orSanitizerInputsChecked(orStream_t stream) {
  orGathered all = {.count = 0};
  OR_TRY(collectInputs(stream, &all));
  free(all.list);
  orSanitizerLock();
  forget(&inputs, all.capture);
  orSanitizerUnlock();
  return orSuccess;
}

orError_t orSanitizerInputReplaced(uint64_t capture, const void *begin) {
  OR_TRY(orEnter());
  orSanitizerLock();
  orGraphMemory *input = find(&inputs, (uintptr_t)begin, capture);
  if (input) input->replaced = true;
  orSanitizerUnlock();
  return orSuccess;
}

static orShadow sideOf(const orGraphFinding *finding, const char *operation, orStack *stack) {
  uintptr_t begin = (uintptr_t)finding->begin;
  return (orShadow){.operation = orSanitizerName(operation),
                    .stack = stack,
                    .stream = finding->stream,
                    .timeline = orTimelineOf(finding->stream),
                    .sequence = orSanitizerMoment(),
                    .range = {.begin = begin, .end = begin + finding->bytes}};
}

orError_t orSanitizerFinding(const orGraphFinding *given) {
  orGraphFinding room;
  orRaceList list = {.first = NULL};
  orSanitizerOptions by;
  const orGraphFinding *finding = OR_VERSIONED(orGraphFinding, given, &room, stack);
  if (!finding) return orErrorInvalidValue;
  if (!orHandleFind(&orStreamTable, finding->stream)) return orErrorInvalidResourceHandle;
  if (!finding->earlier || !finding->later)
    return orFail(orErrorInvalidValue, "orSanitizerFinding: null operation");
  void *captured = orStackCapture(&by);
  orSanitizerLock();
  orStack *earlier = orStackNew(finding->stack, &by), *later = orStackNew(captured, &by);
  orShadow one = sideOf(finding, finding->earlier, earlier);
  orShadow two = sideOf(finding, finding->later, later);
  bool possible = finding->kind == orReportFirstCall;
  if (orSanitizerIsOn() && (!possible || orSanitizerReportsPossible))
    orRaceGraph(finding->kind, &one, &two, &list);
  orStackRelease(earlier);
  orStackRelease(later);
  orSanitizerUnlock();
  orRacesReport(&list);
  orStacksFree();
  return orSuccess;
}
