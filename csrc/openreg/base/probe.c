/*
 * Keeps the registered tools, and the mask of the events that an active tool handles.
 *
 * The list is written before main and read-only after. `lock` serialises changes of orProbesOn; it
 * is a leaf.
 */
#include "base/base.h"

_Atomic uint32_t orProbesOn;

static orTool *tools;
static orMutex lock = OR_MUTEX_INITIALIZER(OR_RANK_LEAF);

void orToolAdd(orTool *tool) {
  tool->next = tools;
  tools = tool;
}

static bool isOn(const orTool *tool) {
  return atomic_load_explicit(&tool->active, memory_order_relaxed);
}

void orToolSwitch(orTool *tool, bool on) {
  uint32_t mask = 0;
  orMutexLock(&lock);
  atomic_store_explicit(&tool->active, on, memory_order_relaxed);
  for (const orTool *t = tools; t; t = t->next)
    for (int event = 0; isOn(t) && event < OR_PROBE_EVENTS; event++)
      mask |= (uint32_t)(t->on[event] != NULL) << event;
  atomic_store_explicit(&orProbesOn, mask, memory_order_relaxed);
  orMutexUnlock(&lock);
}

void orProbeCall(orProbeEvent event, orProbe *probe) {
  for (const orTool *t = tools; t; t = t->next)
    if (t->on[event] && (event < OR_PROBE_QUEUES || isOn(t))) t->on[event](probe);
}
