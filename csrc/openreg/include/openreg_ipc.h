/*
 * Sharing device memory and events between processes of one user on one machine.
 *
 * Each segment of the caching allocator is a file in memory of its own. A process exports a block
 * as an orIpcMemory: plain bytes, to be sent by any means. The other process imports it and gets an
 * address in its own range of the device; both see the same bytes. The description names files by
 * orIpcId. A process that has not opened one yet needs its descriptor first: orIpcFile in a process
 * that has it, a socket (SCM_RIGHTS), and orIpcAddFile.
 *
 * Life: an exported block that its owner frees stays pending free while a description of it is in
 * transit or another process has it imported. The kernel drops the holds of a process that ends,
 * also those for descriptions of imported memory that it has sent.
 * Order: the importing stream waits for what the exporting stream had queued. No host waits.
 */
#ifndef OPENREG_IPC_H
#define OPENREG_IPC_H

#include "openreg.h"

#ifdef __cplusplus
extern "C" {
#endif

/* 128 random bits that name a file. */
typedef struct orIpcId {
  uint64_t bits[2];
} orIpcId;

/* A record of a shared event. A `record` of 0 is over. */
typedef struct orIpcMoment {
  orIpcId file;
  uint32_t slot, generation, record, unused;
} orIpcMoment;

typedef struct orIpcMemory {
  size_t size;      /* sizeof(orIpcMemory) */
  uint32_t version; /* OPENREG_VERSION of the library that exported it */
  int32_t device;
  orIpcId file;
  uint64_t file_bytes; /* of memory in the file */
  uint64_t block;      /* where the block begins in it */
  uint64_t offset, bytes;
  uint32_t generation; /* of the block */
  uint32_t relayed;    /* 1: exported by a process that has imported it */
  orIpcMoment ready;   /* the memory's contents are complete */
} orIpcMemory;

/* Describes [ptr, ptr + bytes) of a live block, or of imported memory, as it is after what is
 * queued on `stream` so far. It counts as in transit until an import of it. Also returns memory
 * that no process holds any more, as orIpcCollect, but looks at a few blocks only.
 * orErrorNotSupported for memory that is not the caching allocator's, and if the process may not
 * open more files (ulimit -n) for segments. */
OR_API orError_t orIpcExport(orIpcMemory *memory, const void *ptr, size_t bytes, orStream_t stream);
/* The memory of a description, on this process's device of the same index. Work that is queued on
 * `stream` afterwards waits for the moment `ready`. Each import needs an orIpcRelease.
 * orErrorNotFound if a file is missing here (orIpcHas). */
OR_API orError_t orIpcImport(void **ptr, const orIpcMemory *memory, orStream_t stream);
/* Ends one import, when the work queued on any stream so far is over. Never blocks. */
OR_API orError_t orIpcRelease(void *ptr);
/* Takes a description out of transit that will not be imported, because this process has the
 * memory already. Its stream waits as for an import. */
OR_API orError_t orIpcReceive(const orIpcMemory *memory, orStream_t stream);
/* How many descriptions of the block are in transit: this process's own of its own memory, those of
 * all processes that have imported it otherwise. If there are more than `most`, the others end
 * first, as lost: no process can read them any more. This process's own of imported memory end
 * only together, by 0. */
OR_API orError_t orIpcTransit(size_t *count, const orIpcMemory *memory, size_t most);
/* Returns what no process holds: blocks of this process, and mappings of imported segments. */
OR_API orError_t orIpcCollect(void);

/* 1 if the file is open here. */
OR_API int orIpcHas(const orIpcId *id);
/* The descriptor of an open file, which the library keeps: duplicate it before another thread can
 * release memory, or hold an import of it. */
OR_API orError_t orIpcFile(int *descriptor, const orIpcId *id);
/* Opens a file that another process has sent. The caller closes its descriptor. A file that is not
 * what its id names, or that another version of the library has made, gives orErrorInvalidValue. */
OR_API orError_t orIpcAddFile(const orIpcId *id, int descriptor);

/* Events of several processes. The creating process keeps the event until orIpcEventDestroy; then
 * other processes get orErrorInvalidResourceHandle. `moment` names the event; orIpcEventRecord sets
 * its record, and orIpcEventNewest reads the newest one of any process. */
OR_API orError_t orIpcEventCreate(orIpcMoment *moment);
OR_API orError_t orIpcEventDestroy(const orIpcMoment *moment);
OR_API orError_t orIpcEventRecord(orIpcMoment *moment, orStream_t stream);
OR_API orError_t orIpcEventNewest(orIpcMoment *moment);
/* orSuccess or orErrorNotReady. */
OR_API orError_t orIpcEventQuery(const orIpcMoment *moment);
/* Makes a stream wait. If the process that recorded ends before its work does, the wait ends and
 * the stream's device reports orErrorSystem at the next call that synchronises. */
OR_API orError_t orIpcEventWait(const orIpcMoment *moment, orStream_t stream);
/* An external event that completes with the moment, for a host to wait for. The caller destroys
 * it. */
OR_API orError_t orIpcEventLocal(orEvent_t *event, const orIpcMoment *moment, int device);

typedef struct orIpcStats {
  size_t size;     /* sizeof(orIpcStats) */
  size_t files;    /* of segments, own and imported */
  size_t imported; /* segments that are mapped here */
  size_t holds;    /* imports that are not released, or wait for queued work, or were sent on */
  size_t pending;  /* blocks of this process that another process or a description holds */
} orIpcStats;
OR_API orError_t orIpcGetStats(orIpcStats *stats);

#ifdef __cplusplus
}
#endif

#endif
