/*
 * Handles: 64-bit numbers that name a slot of a table.
 *
 *   63   62..60   59..54    53..30   29..0
 *    0    kind    device     slot    generation (from 1)
 *
 * A table is reserved once and never unmapped, and a slot keeps its last generation. Any 64-bit
 * number can therefore be looked up: it names a live slot or nothing. A slot whose generations are
 * used up is never reused, so no handle is live twice. A slot's `handle` is authoritative. It is
 * written under the lock of the slot's object and read without it, by a look-up that is repeated
 * under that lock.
 *
 * A walked table has a bitmap behind its slots, with a bit for each reserved slot. It is written
 * under the table's lock and read without it. A walk's cost depends on the slots in use, not on all
 * that ever were.
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>

#include "base/base.h"

/* ---- which slots are reserved ---- */

static _Atomic uint64_t *wordOf(orHandleTable *table, uint32_t index) {
  return (_Atomic uint64_t *)orHandleSlotAt(table, table->limit) + index / 64;
}

static void setReserved(orHandleTable *table, uint32_t index, bool reserved) {
  if (!table->walked) return;
  _Atomic uint64_t *word = wordOf(table, index);
  uint64_t bit = UINT64_C(1) << index % 64,
           before = atomic_load_explicit(word, memory_order_relaxed);
  atomic_store_explicit(word, reserved ? before | bit : before & ~bit, memory_order_release);
}

void *orHandleNext(orHandleTable *table, uint32_t *index) {
  uint32_t used = atomic_load_explicit(&table->used, memory_order_acquire);
  for (; *index < used; *index = (*index | 63) + 1) {
    uint64_t left =
        atomic_load_explicit(wordOf(table, *index), memory_order_acquire) >> *index % 64;
    if (!left) continue;
    *index += (uint32_t)__builtin_ctzll(left) + 1;
    return orHandleSlotAt(table, *index - 1);
  }
  return NULL;
}

/* ---- reserve and recycle ---- */

static orMutex *lockOf(const orHandleTable *table, void *slot) {
  return (orMutex *)((char *)slot + table->lock_at);
}

static orError_t mapTable(orHandleTable *table) {
  if (atomic_load_explicit(&table->base, memory_order_relaxed)) return orSuccess;
  size_t words = table->walked ? (table->limit + 63) / 64 : 0;
  size_t bytes = table->slot_size * table->limit + words * sizeof(uint64_t);
  void *p =
      mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    return orFail(orErrorSystem, "cannot reserve %zu bytes for %ss: %s", bytes, table->what,
                  strerror(errno));
  atomic_store_explicit(&table->base, p, memory_order_release);
  return orSuccess;
}

static orError_t takeSlot(orHandleTable *table, uint32_t *index) {
  OR_TRY(mapTable(table));
  if (table->free_head) {
    *index = table->free_head - 1;
    table->free_head = ((orSlot *)orHandleSlotAt(table, *index))->next_free;
    return orSuccess;
  }
  uint32_t used = atomic_load_explicit(&table->used, memory_order_relaxed);
  if (used == table->limit)
    return orFail(orErrorMemoryAllocation, "no room for another %s: there can be %u at once",
                  table->what, used);
  *index = used;
  atomic_store_explicit(&table->used, used + 1, memory_order_release);
  return orSuccess;
}

orError_t orHandleReserve(orHandleTable *table, int device, void **slot, uint64_t *handle) {
  uint32_t index = 0;
  orMutexLock(&table->lock);
  orError_t e = takeSlot(table, &index);
  if (!e) {
    orSlot *s = *slot = orHandleSlotAt(table, index);
    if (!s->generation && table->lock_at) orMutexInit(lockOf(table, s), table->rank);
    setReserved(table, index, true);
    s->generation++;
    *handle = (uint64_t)table->kind << OR_KIND_AT | (uint64_t)device << OR_DEVICE_AT |
              (uint64_t)index << OR_INDEX_AT | s->generation;
  }
  orMutexUnlock(&table->lock);
  return e;
}

void orHandlePublish(orSlot *slot, uint64_t handle) {
  atomic_store_explicit(&slot->handle, handle, memory_order_release);
}

void orHandleInvalidate(orSlot *slot) {
  atomic_store_explicit(&slot->handle, 0, memory_order_release);
}

void orHandleRecycle(orHandleTable *table, orSlot *slot) {
  uint32_t index =
      (uint32_t)(((char *)slot - atomic_load_explicit(&table->base, memory_order_relaxed)) /
                 (ptrdiff_t)table->slot_size);
  orMutexLock(&table->lock);
  setReserved(table, index, false);
  if (OR_LIKELY(slot->generation < OR_LAST_GENERATION)) {
    slot->next_free = table->free_head;
    table->free_head = index + 1;
  }
  orMutexUnlock(&table->lock);
}

void *orHandleSlotAt(orHandleTable *table, uint32_t index) {
  return atomic_load_explicit(&table->base, memory_order_acquire) + table->slot_size * index;
}

void *orHandleFind(orHandleTable *table, uint64_t handle) {
  uint32_t index = orHandleIndex(handle);
  if (handle && index < atomic_load_explicit(&table->used, memory_order_acquire)) {
    orSlot *s = orHandleSlotAt(table, index);
    if (atomic_load_explicit(&s->handle, memory_order_acquire) == handle) return s;
  }
  orHandleRefuse(table, handle);
  return NULL;
}

void *orHandleLock(orHandleTable *table, uint64_t handle) {
  orSlot *s = orHandleFind(table, handle);
  if (!s) return NULL;
  orMutexLock(lockOf(table, s));
  if (OR_LIKELY(orHandleIs(s, handle))) return s;
  orMutexUnlock(lockOf(table, s));
  orHandleRefuse(table, handle);
  return NULL;
}

orError_t orHandleRefuse(const orHandleTable *table, uint64_t handle) {
  return orFail(orErrorInvalidResourceHandle, "0x%" PRIx64 " is not a live %s", handle,
                table->what);
}
