/*
 * What the sanitizer's reports name, kept once: names of operations and stacks.
 *
 * Two names are the same if their addresses are. Names are never given back: there are as many as
 * there are operators.
 *
 * A stack is what the sanitizer's user captured at an access. The last reference may go on any
 * thread, also where the user's function may not be called (a deleter, a worker). So the stack goes
 * to `dead` then, until somebody calls orStacksFree; what it was kept in is used again.
 *
 * All under orSanitizerMutex.
 */
#include <stdlib.h>
#include <string.h>

#include "sanitizer/private.h"

/* ---- names ---- */

/* A table with open addressing. */
static struct {
  const char **slots;
  size_t mask, count;
} names;

static size_t hashOf(const char *text) {
  size_t hash = 14695981039346656037u;
  for (; *text; text++) hash = (hash ^ (unsigned char)*text) * 1099511628211u;
  return hash ^ hash >> 32;
}

static const char **nameSlot(const char *text) {
  size_t i = hashOf(text) & names.mask;
  while (names.slots[i] && strcmp(names.slots[i], text)) i = (i + 1) & names.mask;
  return &names.slots[i];
}

static void growNames(void) {
  size_t old_count = names.slots ? names.mask + 1 : 0;
  const char **old = names.slots;
  size_t count = old_count ? old_count * 2 : 256;
  names.slots = orSanitizerAllocate(count * sizeof *names.slots);
  memset(names.slots, 0, count * sizeof *names.slots);
  names.mask = count - 1;
  for (size_t i = 0; i < old_count; i++)
    if (old[i]) *nameSlot(old[i]) = old[i];
  free(old);
}

const char *orSanitizerName(const char *text) {
  if (2 * names.count >= names.mask) growNames();
  const char **slot = nameSlot(text);
  if (OR_UNLIKELY(!*slot)) {
    size_t size = strlen(text) + 1;
    char *copy = orSanitizerAllocate(size);
    *slot = memcpy(copy, text, size);
    names.count++;
  }
  return *slot;
}

/* ---- stacks ---- */

static orStack *dead, *spare;

void *orStackCapture(orSanitizerOptions *by) {
  orMutexLock(&orSanitizerMutex);
  *by = orSanitizerChosen;
  orMutexUnlock(&orSanitizerMutex);
  return by->capture ? by->capture(by->context) : NULL;
}

orStack *orStackNew(void *captured, const orSanitizerOptions *by) {
  if (!captured) return NULL;
  orStack *stack = spare;
  if (stack)
    spare = stack->next;
  else
    stack = orSanitizerAllocate(sizeof *stack);
  *stack = (orStack){captured, by->release, by->context, .refs = 1};
  return stack;
}

void orStackRelease(orStack *stack) {
  if (!stack || --stack->refs) return;
  stack->next = dead;
  dead = stack;
}

bool orStacksAreDead(void) { return dead; }

void orStacksFree(void) {
  orMutexLock(&orSanitizerMutex);
  orStack *all = dead, *last = all;
  dead = NULL;
  orMutexUnlock(&orSanitizerMutex);
  if (!all) return;
  for (orStack *s = all; s; last = s, s = s->next) s->release(s->stack, s->context);
  orMutexLock(&orSanitizerMutex);
  last->next = spare;
  spare = all;
  orMutexUnlock(&orSanitizerMutex);
}
