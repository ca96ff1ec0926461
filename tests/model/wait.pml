/*
 * A model for Spin of how streams, workers and waiting hosts wake each other. `make model` runs it.
 *
 * It has the functions of these names, under sequential consistency (wait.cpp has the orders). A
 * change of one of them must be made here too.
 *   host_wait.c  announceSleep sleepUntilOver orStreamWakeSleepers
 *   worker.c     orWorkerSchedule chooseWorker wake sleepWorker pick leaveTheRest letGoIfEmpty
 *                runStream runFront orWorkerGiveBack orWorkerRun orWorkerTake
 *   stream.c     publish submitAndWait orStreamFinishTask orStreamTryIdle orStreamResume
 *   event.c      orCellWaitOrPark orCellComplete nextWaiter
 *
 * There are two hosts, two streams and two workers, which are not started at first. A stream must
 * be in the ready list once and run on one thread at a time, and nothing may stand still until both
 * hosts are done. Spin reports a lost wake-up as an "invalid end state": only a worker may be
 * asleep at the end.
 *
 * PROGRAM 1: both hosts launch on one stream and wait
 * PROGRAM 2: one records an event and waits, the other's stream waits for the event
 * PROGRAM 3: one waits for an external event, which the other signals
 * PROGRAM 4: each launches a kernel that runs until the other's runs, while a worker may look
 *
 * A critical section with at most one access that others see without the lock is one step, so locks
 * are no variables here. Left out: priorities, the spinning of hosts, pieces of large tasks, the
 * core of a worker that looks, threads that the system refuses, the process's end.
 *
 * PLANT=n plants a fault, which Spin must find in the named program:
 * PLANT 1 (PROGRAM 1): orStreamWakeSleepers changes wake_word before it resets wake_at
 * PLANT 2 (PROGRAM 1): a host sleeps without reading `completed` again
 * PLANT 3 (PROGRAM 1): orStreamTryIdle reads the counters before it has the stream's lock
 * PLANT 4 (PROGRAM 2): orCellWaitOrPark does not check the cell again under its lock
 * PLANT 5 (PROGRAM 1): a worker clears `awake` after it has released the lock
 * PLANT 6 (PROGRAM 1): a worker stops looking without checking the list
 * PLANT 7 (PROGRAM 1): orStreamFinishTask loads wake_at before it stores `completed`
 * PLANT 8 (PROGRAM 3): orCellComplete reads whether hosts sleep before it sets the cell done
 * PLANT 9 (PROGRAM 1): orWorkerTake does not check whether the stream is in the list
 * PLANT 10 (PROGRAM 4): leaveTheRest wakes no worker for a stream that is left
 */
#ifndef PLANT
#define PLANT 0
#endif

#define NOBODY 99
#define NONE 2 /* no worker */
mtype = {idle, ready, running, waiting, kernel, record, wait, meet};

/* A stream: `state` and the tasks under its lock, `completed` its runner's, `queued` atomic. */
mtype state[2] = idle;
mtype task[8]; /* of stream s, number n: task[4 * s + n] */
byte queued[2], completed[2];
byte wake_at[2] = NOBODY, wake_word[2];

/* The scheduler, under its lock but for `looking` and `awake`. */
bit listed[2], sleeps[2], started[2];
bit looking[2], awake[2];

/* The cell that the record completes, and its waiting streams. */
bit done, waiter[2];

/* Kernels of PROGRAM 4 that have begun. */
byte met;

/* The external event: a cell with no stream. */
bit signalled, has_sleeper;

/* A futex wait: what host h sleeps on. */
#define AWAKE 0
#define ON_STREAM(s) (1 + (s))
#define ON_EVENT 3
byte asleep[2];
#define FUTEX_WAKE(on) \
  d_step { \
    if :: asleep[0] == on -> asleep[0] = AWAKE :: else fi; \
    if :: asleep[1] == on -> asleep[1] = AWAKE :: else fi \
  }

/* ---- worker.c: waking workers ---- */

inline chooseWorker() {
  if
  :: sleeps[0] -> sleeps[0] = 0; worker = 0
  :: !sleeps[0] && sleeps[1] -> sleeps[1] = 0; worker = 1
  :: !sleeps[0] && !sleeps[1] && !started[0] -> started[0] = 1; worker = 0
  :: !sleeps[0] && !sleeps[1] && started[0] && !started[1] -> started[1] = 1; worker = 1
  :: else -> worker = NONE
  fi
}

inline wakeLane() {
  if
  :: worker != NONE -> awake[worker] = 1; worker = NONE
  :: else
  fi
}

inline orWorkerSchedule(s) {
  d_step {
    assert(!listed[s] && state[s] == ready);
    listed[s] = 1;
    if :: looking[0] || looking[1] -> worker = NONE :: else -> chooseWorker() fi
  }
  wakeLane()
}

/* A part of a step under the scheduler's lock. */
inline leaveTheRest(me) {
  looking[me] = 0;
#if PLANT == 10
  worker = NONE
#else
  if
  :: (listed[0] || listed[1]) && !looking[0] && !looking[1] -> chooseWorker()
  :: else -> worker = NONE
  fi
#endif
}

/* ---- stream.c and event.c: progress ---- */

inline orStreamResume(s) {
  d_step {
    if
    :: state[s] == waiting -> waiter[s] = 0; state[s] = ready; resumed = 1
    :: else -> resumed = 0
    fi
  }
  if :: resumed -> resumed = 0; orWorkerSchedule(s) :: else fi
}

inline orCellComplete() {
  done = 1;
  do
  :: d_step { waiter[0] -> waiter[0] = 0; other = 0 } orStreamResume(other)
  :: d_step { !waiter[0] && waiter[1] -> waiter[1] = 0; other = 1 } orStreamResume(other)
  :: d_step { !waiter[0] && !waiter[1] -> other = 0 } break
  od
}

inline orStreamWakeSleepers(s) {
#if PLANT == 1
  wake_word[s]++;
  wake_at[s] = NOBODY;
#else
  wake_at[s] = NOBODY;
  wake_word[s]++;
#endif
  FUTEX_WAKE(ON_STREAM(s))
}

inline orStreamFinishTask(s) {
#if PLANT == 7
  at = wake_at[s];
  completed[s]++;
#else
  completed[s]++;
  at = wake_at[s];
#endif
  if :: completed[s] >= at -> at = 0; orStreamWakeSleepers(s) :: else -> at = 0 fi
}

/* goes = 0: the stream waits and is no longer the caller's. */
inline orCellWaitOrPark(s) {
  if
  :: done
#if PLANT == 4
  :: !done -> d_step { waiter[s] = 1; state[s] = waiting; goes = 0 }
#else
  :: !done ->
    d_step { if :: !done -> waiter[s] = 1; state[s] = waiting; goes = 0 :: else fi }
#endif
  fi
}

inline runFront(s) {
  d_step { assert(state[s] == running && completed[s] < queued[s]); goes = 1 }
  if
  :: task[4 * s + completed[s] + 1] == kernel
  :: task[4 * s + completed[s] + 1] == record -> orCellComplete()
  :: task[4 * s + completed[s] + 1] == wait -> orCellWaitOrPark(s)
#if PROGRAM == 4
  :: task[4 * s + completed[s] + 1] == meet -> met++; met == 2
#endif
  fi;
  if :: goes -> orStreamFinishTask(s) :: else fi
}

/* drained = 1: the stream is no longer the caller's. */
inline orStreamTryIdle(s) {
#if PLANT == 3
  drained = completed[s] == queued[s];
  d_step { if :: drained -> state[s] = idle :: else fi }
#else
  d_step {
    drained = completed[s] == queued[s];
    if :: drained -> state[s] = idle :: else fi
  }
#endif
}

inline orWorkerGiveBack(s) {
  state[s] = ready;
  orWorkerSchedule(s)
}

/* ---- worker.c: the worker ---- */

proctype Worker(bit me) {
  byte worker = NONE, at;
  bit s, other, resumed, goes, drained, spun;

end_new:
  awake[me];

pick:
  if
  :: d_step { listed[0] -> listed[0] = 0; s = 0; spun = 0; leaveTheRest(me) }
  :: d_step { listed[1] -> listed[1] = 0; s = 1; spun = 0; leaveTheRest(me) }
  :: d_step { !listed[0] && !listed[1] && !spun -> looking[me] = 1; spun = 1 } goto pick
#if PLANT == 5
  :: d_step { !listed[0] && !listed[1] && spun -> looking[me] = 0; sleeps[me] = 1 }
    awake[me] = 0;
#elif PLANT == 6
  :: spun -> looking[me] = 0; d_step { sleeps[me] = 1; awake[me] = 0 }
#else
  :: d_step {
      !listed[0] && !listed[1] && spun ->
      looking[me] = 0; sleeps[me] = 1; awake[me] = 0
    }
#endif
end_asleep:
    awake[me];
    goto pick
  fi;
  wakeLane();
  d_step { assert(state[s] == ready); state[s] = running }

serve:
  if
  :: completed[s] == queued[s] ->
    looking[me] = 1;
    orStreamTryIdle(s);
    if
    :: drained -> drained = 0; s = 0; goto pick
    :: else -> d_step { leaveTheRest(me) } wakeLane(); goto serve
    fi
  :: completed[s] < queued[s] ->
    runFront(s);
    if
    :: goes && (listed[0] || listed[1]) -> goes = 0; orWorkerGiveBack(s); s = 0; goto pick
    :: goes -> goes = 0; goto serve
    :: else -> s = 0; goto pick
    fi
  fi
}

/* ---- stream.c and host_wait.c: hosts ---- */

/* mine = 1: the stream is the host's to run. */
inline publish(s, kind, awaits) {
  d_step {
    task[4 * s + queued[s] + 1] = kind;
    resumed = state[s] == idle && !awaits;
    mine = state[s] == idle && awaits;
    if
    :: mine -> state[s] = running
    :: resumed -> state[s] = ready
    :: else
    fi;
    queued[s]++;
    number = queued[s]
  }
  if :: resumed -> resumed = 0; orWorkerSchedule(s) :: else fi
}

inline orWorkerTake(s) {
  if
  :: state[s] == ready ->
#if PLANT == 9
    d_step { listed[s] = 0; mine = 1 }
#else
    d_step { if :: listed[s] -> listed[s] = 0; mine = 1 :: else fi }
#endif
  :: else
  fi
}

inline orWorkerRun(s) {
  state[s] = running;
  goes = 1;
  do
  :: goes && completed[s] < number -> runFront(s)
  :: else -> break
  od;
  if
  :: goes ->
    orStreamTryIdle(s);
    if :: drained -> drained = 0 :: else -> orWorkerGiveBack(s) fi
  :: else
  fi;
  goes = 0
}

inline awaitStream(s) {
  do
  :: completed[s] >= number -> break
  :: else ->
    value = wake_word[s];
    at = wake_at[s];
    do /* exchanges wake_at if it has not changed */
    :: number < at ->
      atomic { if :: wake_at[s] == at -> wake_at[s] = number; at = 0 :: else -> at = wake_at[s] fi }
    :: else -> at = 0; break
    od;
#if PLANT != 2
    if :: completed[s] >= number -> break :: else fi;
#endif
    atomic { if :: wake_word[s] == value -> asleep[me] = ON_STREAM(s) :: else fi }
    asleep[me] == AWAKE
  od;
  atomic { value = 0; number = 0 }
}

inline synchronize(s) {
  number = queued[s];
  awaitStream(s)
}

inline submitAndWait(s) {
  publish(s, kernel, true);
  if :: !mine -> orWorkerTake(s) :: else fi;
  if :: mine -> mine = 0; orWorkerRun(s) :: else fi;
  awaitStream(s)
}

/* Its futex is the cell's state. */
inline awaitEvent() {
  do
  :: signalled -> break
  :: else ->
    has_sleeper = 1;
    if :: signalled -> break :: else fi;
    atomic { if :: !signalled -> asleep[me] = ON_EVENT :: else fi }
    asleep[me] == AWAKE
  od
}

inline orEventSignal() {
#if PLANT == 8
  goes = has_sleeper;
  signalled = 1;
#else
  d_step { signalled = 1; goes = has_sleeper }
#endif
  if :: goes -> goes = 0; FUTEX_WAKE(ON_EVENT) :: else fi
}

proctype Host(bit me) {
  byte worker = NONE, at, number, value;
  bit other, resumed, goes, drained, mine;

#if PROGRAM == 1
  if :: me == 0 -> publish(0, kernel, false) :: else fi;
  submitAndWait(0);
  submitAndWait(0)
#elif PROGRAM == 2
  if
  :: me == 0 -> publish(0, record, false); synchronize(0)
  :: else -> publish(1, wait, false); submitAndWait(1)
  fi
#elif PROGRAM == 3
  if
  :: me == 0 -> publish(0, kernel, false); awaitEvent(); synchronize(0)
  :: else -> publish(1, kernel, false); orEventSignal(); synchronize(0); synchronize(1)
  fi
#elif PROGRAM == 4
  if :: me == 0 -> publish(0, kernel, false); synchronize(0) :: else fi;
  publish(me, meet, false);
  synchronize(me)
#endif
}

init {
  atomic { run Worker(0); run Worker(1); run Host(0); run Host(1) }
}
