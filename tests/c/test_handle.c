/*
 * The core's tables of handles. The library does not export them, and a test that used a slot's
 * 2^30 generations up by its calls would take minutes, so they are compiled into the tests.
 */
#undef OR_DEBUG /* its mutexes are the library's */
#define orFail failOfHandles
#include "../../csrc/openreg/base/handle.c"
#include "harness.h"

orError_t orFail(orError_t error, const char *format, ...) {
  (void)format;
  return error;
}

static orHandleTable table = {.kind = OR_HANDLE_EVENT,
                              .what = "event",
                              .slot_size = sizeof(orSlot),
                              .limit = 2,
                              .lock = {PTHREAD_MUTEX_INITIALIZER}};

static uint64_t make(orSlot **slot) {
  void *reserved = NULL;
  uint64_t handle = 0;
  ASSERT_OK(orHandleReserve(&table, 0, &reserved, &handle));
  *slot = reserved;
  orHandlePublish(*slot, handle);
  ASSERT_PTR(orHandleFind(&table, handle), *slot);
  return handle;
}

static void end(orSlot *slot) {
  orHandleInvalidate(slot);
  orHandleRecycle(&table, slot);
}

static orHandleTable walked = {.kind = OR_HANDLE_STREAM,
                               .what = "stream",
                               .slot_size = sizeof(orSlot),
                               .limit = 200,
                               .walked = true,
                               .lock = {PTHREAD_MUTEX_INITIALIZER}};

static int lengthOfWalk(void) {
  int length = 0;
  uint32_t index = 0, before = 0;
  for (void *slot; (slot = orHandleNext(&walked, &index)); length++) {
    ASSERT_GT(index, before);
    before = index;
    ASSERT_PTR(slot, orHandleSlotAt(&walked, index - 1));
  }
  return length;
}

TEST(handle_walk_is_over_reserved_slots) {
  enum { MOST = 200 };
  void *slots[MOST];
  uint64_t handle;
  ASSERT_EQ(lengthOfWalk(), 0);
  for (int i = 0; i < MOST; i++) {
    ASSERT_OK(orHandleReserve(&walked, 0, &slots[i], &handle));
    ASSERT_EQ(lengthOfWalk(), i + 1);
  }
  for (int i = 0, left = MOST; i < MOST; i++) {
    if (i % 64 == 3) continue;
    orHandleRecycle(&walked, slots[i]);
    ASSERT_EQ(lengthOfWalk(), --left);
  }
}

TEST(handle_is_never_live_again) {
  orSlot *slot, *other;
  void *none;
  uint64_t first = make(&slot), handle;
  end(slot);
  slot->generation = OR_LAST_GENERATION - 1;
  handle = make(&other);
  ASSERT_PTR(other, slot);
  ASSERT_EQ(orHandleGeneration(handle), OR_LAST_GENERATION);
  end(slot);
  /* Its handles are used up: another slot, and then none, takes its place. */
  for (int i = 0; i < 2; i++) {
    make(&other);
    ASSERT_NE((intptr_t)other, (intptr_t)slot);
    ASSERT_PTR(orHandleFind(&table, first), NULL);
    other->generation = OR_LAST_GENERATION - (i == 0);
    end(other);
  }
  ASSERT_ERROR(orHandleReserve(&table, 0, &none, &handle), orErrorMemoryAllocation);
}
