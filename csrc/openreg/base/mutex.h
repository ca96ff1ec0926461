/*
 * Mutexes, and the order in which they may be taken.
 *
 * A thread that holds a mutex takes only those further down the list, and sleeps with none held
 * (orFutexWait). With OR_DEBUG both rules are asserted, as are functions that require a lock
 * (orMutexAssertHeld); each thread keeps a list of what it holds.
 */
#pragma once

#include <pthread.h>

typedef enum orRank {
  OR_RANK_REGISTRY = 1, /* of device factories */
  OR_RANK_FIRST_USE,    /* of a device */
  OR_RANK_EVENT,
  OR_RANK_GRAPH,
  OR_RANK_SHARING, /* of memory and events with other processes */
  OR_RANK_CACHE,   /* one a device */
  OR_RANK_REGIONS,
  OR_RANK_ARENA, /* the one-time mapping of the simulated devices' addresses */
  OR_RANK_PAGES, /* of a simulated device */
  OR_RANK_FAILURE,
  OR_RANK_STREAMS, /* while a stream is made, or all are notified */
  OR_RANK_HANDLES,
  OR_RANK_STREAM,
  OR_RANK_CAPTURE,
  OR_RANK_CELL,
  OR_RANK_CELLS, /* the pool of cells */
  OR_RANK_WORKERS,
  OR_RANK_TOOLS, /* a tool's own: an event may be reported to it under any of those above */
  /* Under these no other is taken. */
  OR_RANK_LEAF
} orRank;

/* An adaptive mutex spins briefly before it sleeps. All of musl's do. */
#ifdef PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP
#define OR_PTHREAD_MUTEX PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP
#else
#define OR_PTHREAD_MUTEX PTHREAD_MUTEX_INITIALIZER
#endif

typedef struct orMutex {
  pthread_mutex_t mutex;
#ifdef OR_DEBUG
  orRank rank;
#endif
} orMutex;

#ifdef OR_DEBUG
#define OR_MUTEX_INITIALIZER(its_rank) {.mutex = OR_PTHREAD_MUTEX, .rank = its_rank}
#else
#define OR_MUTEX_INITIALIZER(its_rank) {.mutex = OR_PTHREAD_MUTEX}
#endif

static inline void orMutexInit(orMutex *m, orRank rank) {
  (void)rank;
  *m = (orMutex)OR_MUTEX_INITIALIZER(rank);
}

#ifdef OR_DEBUG
void orMutexLock(orMutex *m);
void orMutexUnlock(orMutex *m);
void orMutexAssertHeld(const orMutex *m);
void orMutexAssertNone(void); /* no lock is held by the calling thread */
#else
static inline void orMutexLock(orMutex *m) { pthread_mutex_lock(&m->mutex); }
static inline void orMutexUnlock(orMutex *m) { pthread_mutex_unlock(&m->mutex); }
static inline void orMutexAssertHeld(const orMutex *m) { (void)m; }
static inline void orMutexAssertNone(void) {}
#endif
