/*
 * Files in memory that processes share: segments of device memory, and the words of events.
 */
#pragma once

#include "device/device.h"
#include "openreg_ipc.h"

enum { OR_SHARED_UNIT = 512, OR_MOST_SHARED_FILES = 16384 };

/* A block, by its first unit in the segment. */
typedef struct orShare {
  _Atomic uint64_t use;   /* its generation and descriptions in transit: cache/ipc.c */
  _Atomic uint64_t bytes; /* of the block */
} orShare;

/* The last bytes of each file. */
typedef struct orSharedHead {
  uint64_t magic;
  uint32_t version; /* OPENREG_VERSION */
  int32_t device;   /* of a segment */
  uint64_t bytes;   /* of memory in a segment */
  orIpcId id;
  _Atomic uint32_t gone; /* its owner has freed the segment */
  uint32_t unused[5];
} orSharedHead;
_Static_assert(sizeof(orSharedHead) == 64, "the head has the same place in every build");
extern const uint64_t orSharedSegment, orSharedEvents; /* values of `magic` */

typedef struct orSharedFile {
  _Atomic int descriptor; /* this process's own open file; -1: the entry is free */
  void *base;             /* of a segment: its address in this process */
  size_t bytes;
  int device;
  bool imported;
  bool ending;  /* being unmapped; not found any more */
  size_t holds; /* of this process */
  orIpcId id;   /* zeros until it is shared */
  char *shared; /* what is mapped beside the memory, or null until then: orShare or event slots */
  size_t shared_bytes;
  orSharedHead *head; /* in it */
} orSharedFile;

/* Guards all entries but their descriptors, and what ipc.c and ipc_event.c have. */
void orSharedLock(void);
void orSharedUnlock(void);

/* Gives a new segment a file of its own. Returns its entry's number, or 0: then the segment works,
 * and cannot be shared. No lock held. */
int orSharedFileMake(int device, void *base, size_t bytes);
/* Ends a segment's file. False if its pages are still mapped there. No lock held. */
bool orSharedFileEnd(int file);
/* Makes a file of one's own findable by an id. Lock held. */
orError_t orSharedFilePublish(orSharedFile *file);
/* A file of `bytes`, zeros, with a head; for events. Lock held. */
orError_t orSharedFileCreate(uint64_t magic, size_t bytes, orSharedFile **file);
/* Opens a file of another process. A segment is not mapped yet. Lock held. */
orError_t orSharedFileOpen(const orIpcId *id, int descriptor, orSharedFile **file);
/* Maps an opened segment at `base`. Lock held. */
orError_t orSharedFileMap(orSharedFile *file, void *base);
/* Closes a file that has no memory mapped. Lock held. */
void orSharedFileClose(orSharedFile *file);

orSharedFile *orSharedFileAt(int number);
int orSharedFileNumber(const orSharedFile *file);
/* Null if there is none. Lock held. */
orSharedFile *orSharedFileFind(const orIpcId *id);
/* The entry from `number` on that is in use, or null. Lock held. */
orSharedFile *orSharedFileNext(int number);
/* How many files the process may open for segments. */
int orSharedFileLimit(void);

/* The kernel's locks of one byte, which end with the process. */
bool orSharedByteHold(const orSharedFile *file, uint64_t byte);
void orSharedByteDrop(const orSharedFile *file, uint64_t byte);
/* Whether any other process holds the byte. */
bool orSharedByteHeld(const orSharedFile *file, uint64_t byte);
/* Holds byte 0 while this process lives, through an open file that is never sent. */
orError_t orSharedFileMarkAlive(orSharedFile *file);

static inline orShare *orShareAt(const orSharedFile *file, uint64_t block) {
  return (orShare *)(void *)file->shared + block / OR_SHARED_UNIT;
}
