/*
 * The sanitizer's stacks: what its user captured at an access, for as long as anybody refers to it.
 *
 * The last reference may go on any thread, also where the user's function may not be called (a
 * deleter, a lane). So the stack goes to `dead` then, until somebody calls orStacksRelease; what it
 * was kept in is used again.
 *
 * `dead`, `spare` and the references are under orSanitizerMutex.
 */
#include "sanitizer.h"

static orStack *dead, *spare;

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

void orStackDrop(orStack *stack) {
  if (!stack || --stack->refs) return;
  stack->next = dead;
  dead = stack;
}

bool orStacksAreDead(void) { return dead; }

void orStacksRelease(void) {
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
