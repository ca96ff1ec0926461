/*
 * The mutexes that a thread holds, for the assertions of mutex.h. The list is the thread's own, in
 * order of locking. Each has a higher rank than those before it, so the last has the highest.
 */
#include "base/base.h"

#ifdef OR_DEBUG

enum { OR_MOST_HELD = 16 };

static _Thread_local const orMutex *held[OR_MOST_HELD];
static _Thread_local int count;

static int placeOf(const orMutex *m) {
  int i = count;
  while (i && held[i - 1] != m) i--;
  return i - 1;
}

void orMutexLock(orMutex *m) {
  OR_ASSERT(m->rank, !=, 0);
  OR_ASSERT(count, <, OR_MOST_HELD);
  OR_ASSERT(m->rank, >, count ? held[count - 1]->rank : 0);
  pthread_mutex_lock(&m->mutex);
  held[count++] = m;
}

void orMutexUnlock(orMutex *m) {
  int at = placeOf(m);
  OR_ASSERT(at, !=, -1);
  for (count--; at < count; at++) held[at] = held[at + 1];
  pthread_mutex_unlock(&m->mutex);
}

void orMutexAssertHeld(const orMutex *m) { OR_ASSERT(placeOf(m), !=, -1); }

void orMutexAssertNone(void) { OR_ASSERT(count, ==, 0); }

#else
typedef int orNothing; /* a file must have a declaration */
#endif
