/*
 * A model for Relacy of queue.c: orQueueReserve, orQueueCommit, orQueueFront, orQueuePop and
 * orQueueReuse, with stream.c's publish and worker.c's frontTask and seeMore around them.
 *
 * A producer queues records under the stream's lock, abandons a reservation that would begin a
 * chunk, and takes emptied chunks again. A worker consumes without the lock. Every record has to
 * arrive, in order, and no field that is not atomic may be in a race.
 *
 * PLANT 1: publish stores `queued` relaxed
 * PLANT 2: seeMore loads `queued` relaxed
 * PLANT 3: frontTask gives an emptied chunk back before it has read the chunk's link
 * PLANT 4: frontTask gives an emptied chunk back without the stream's lock
 * PLANT 5: publish counts a record before orQueueCommit has made it part of the queue
 */
#include "model.hpp"

using namespace rl;

enum { ROOM = 2, RECORDS = 5, ABANDONED = 3, CHUNKS = 5 };

struct Chunk {
  var<Chunk *> next;
  atomic<unsigned> end;
  var<int> data[ROOM];
};

struct Queue : test_suite<Queue, 2> {
  Chunk chunks[CHUNKS];
  mutex lock;
  atomic<unsigned> queued;
  var<int> allocated;
  var<Chunk *> tail, spare, head;
  var<unsigned> offset;

  void before() {
    queued($) = 0;
    allocated($) = 0;
    tail($) = spare($) = head($) = nullptr;
    offset($) = 0;
    for (auto &c : chunks) {
      c.next($) = nullptr;
      c.end($) = 0;
    }
  }

  static unsigned endOf(Chunk *c) { return c->end.load(memory_order_relaxed); }

  void makeSpare() {
    if (spare($)) return;
    int number = allocated($);
    allocated($) = number + 1;
    RL_ASSERT(number < CHUNKS);
    spare($) = &chunks[number];
  }

  void linkSpare() {
    Chunk *c = spare($), *last = tail($);
    spare($) = nullptr;
    c->next($) = nullptr;
    c->end.store(0, memory_order_relaxed);
    if (last)
      last->next($) = c;
    else
      head($) = c;
    tail($) = c;
  }

  /* True if the record is in the spare chunk. */
  bool orQueueReserve() {
    Chunk *last = tail($);
    bool fits = last && ROOM - endOf(last) >= 1;
    if (!fits) makeSpare();
    Chunk *in = fits ? last : (Chunk *)spare($);
    in->data[fits ? endOf(last) : 0]($) = -1;
    return !fits;
  }

  void orQueueCommit(bool in_spare, int value) {
    if (in_spare) linkSpare();
    Chunk *last = tail($);
    unsigned end = endOf(last);
    last->data[end]($) = value;
    last->end.store(end + 1, memory_order_relaxed);
  }

  void count(unsigned number) { queued.store(number, unlessPlanted(1, mo_release, mo_relaxed), $); }

  void publish(int number, bool abandon) {
    lock.lock($);
    bool in_spare = orQueueReserve();
    if (!abandon) {
      if (plant == 5) count(number);
      orQueueCommit(in_spare, number);
      if (plant != 5) count(number);
    }
    lock.unlock($);
  }

  void producer() {
    for (int number = 1; number <= RECORDS; number++) {
      if (number == ABANDONED) publish(number, true);
      publish(number, false);
    }
  }

  void giveBack(Chunk *emptied) {
    if (plant != 4) lock.lock($);
    if (!spare($)) spare($) = emptied;
    if (plant != 4) lock.unlock($);
  }

  void consume(int number) {
    Chunk *c = head($), *emptied = nullptr;
    if (offset($) == endOf(c)) {
      emptied = c;
      if (plant == 3) giveBack(c);
      c = c->next($);
      RL_ASSERT(c);
      head($) = c;
      offset($) = 0;
    }
    unsigned at = offset($);
    RL_ASSERT(at < endOf(c));
    RL_ASSERT(c->data[at]($) == number);
    if (emptied && plant != 3) giveBack(emptied);
    offset($) = at + 1;
  }

  /* Gives up in the end: a schedule may never let the producer run. */
  void worker() {
    unsigned seen = 0;
    for (int number = 1, looks = 0; number <= RECORDS && looks < 200;) {
      if ((unsigned)number > seen) {
        seen = queued.load(unlessPlanted(2, mo_acquire, mo_relaxed), $);
        if ((unsigned)number > seen) {
          looks++;
          yield(1, $);
          continue;
        }
      }
      consume(number++);
    }
  }

  void thread(unsigned number) {
    if (number == 0)
      producer();
    else
      worker();
  }
};

int main(int argc, char **argv) { return runModel<Queue>(argc, argv); }
