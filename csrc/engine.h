/* The C face of the monarch_rdma core. Python (through cffi), the torch ops and the benchmark program use nothing else.
 *
 * Conventions
 *  - Sizes and offsets are bytes, times are seconds (double); a negative timeout means "no deadline".
 *  - Functions that can fail return MR_OK (0) or an mr_kind, and describe the failure in *error (may be NULL).
 *  - Handles are opaque. mr_op is reference counted: whoever gets one gives it back with mr_op_release.
 *  - Every function may be called from any thread. None calls back into the caller except through mr_message_handler
 * and mr_interrupted.
 *  - After fork() the child must not use an engine of its parent: every call returns MR_CONFIG there.
 *
 * The section between the two cffi marks is parsed by the Python binding: plain declarations and integer constants
 * only.
 */
#ifndef MONARCH_RDMA_ENGINE_H
#define MONARCH_RDMA_ENGINE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* cffi: begin */

/* The closed family of failures; monarch_rdma/errors.py maps them one to one. */
enum mr_kind {
  MR_OK = 0,
  MR_PEER_LOST = 1,          /* the process at the other end died, stopped answering or was cut off */
  MR_TRANSFER_TIMEOUT = 2,   /* the operation's deadline passed */
  MR_CANCELLED = 3,          /* the caller cancelled it */
  MR_ACCESS_DENIED = 4,      /* region dropped, never granted, or wrong key or right */
  MR_OUT_OF_BOUNDS = 5,      /* a view leaves its region */
  MR_REGISTRATION = 6,       /* memory could not be registered or mapped */
  MR_AUTHENTICATION = 7,     /* the other side is not a member of the job */
  MR_PROTOCOL = 8,           /* version mismatch or malformed data from the other side */
  MR_RESOURCE_EXHAUSTED = 9, /* a limit was reached; the message says which option raises it */
  MR_CONFIG = 10             /* an argument or option is wrong, or the engine is closed */
};

/* Rights of a region; also the verbs of a transfer. */
enum mr_access { MR_READ = 1, MR_WRITE = 2 };

/* What mr_peer_fault does to a connection. */
enum mr_fault {
  MR_FAULT_BREAK = 1,  /* its sockets end, as by a reset */
  MR_FAULT_CUT = 2,    /* nothing gets through, and nobody is told */
  MR_FAULT_SLOW = 3,   /* `amount` bytes a second are read, on each socket */
  MR_FAULT_CORRUPT = 4 /* the next frame that comes has a damaged head: `amount` says how, from 0 on */
};

/* What a failed write knows about the remote bytes. */
enum mr_remote_state { MR_NOT_WRITTEN = 0, MR_WRITTEN = 1, MR_UNKNOWN = 2 };

/* Transfer flags. Bits 8.. name lanes to use; none set means all. */
enum mr_flags {
  MR_STRICT = 1,
  MR_BULK = 2, /* one of many, of MR_BULK_BYTES or more together: its bytes go past the caches */
  MR_LANE_SHM = 256,
  MR_LANE_TCP = 512,
  MR_LANE_VERBS = 1024,
  MR_LANE_IPC = 2048, /* these two: for memory of GPUs */
  MR_LANE_STAGED = 4096
};

/* Largest number of dimensions of a view, after contiguous dimensions are merged. */
enum mr_limits { MR_MAX_DIMS = 16, MR_MESSAGE_BYTES = 1024, MR_BULK_BYTES = 16777216 };

typedef struct {
  int32_t kind;      /* enum mr_kind */
  int32_t sys_errno; /* errno behind it, or 0 */
  char message[1024];
} mr_error;

/* Bytes of a region in logical (row-major) order: for each index (i0, .., i[ndim-1]) the `run` contiguous bytes at
 * offset + sum(i[k] * stride[k]). ndim == 0 is one contiguous run. Total bytes = run * product(count). */
typedef struct {
  uint64_t offset;
  uint64_t run;
  uint32_t ndim;
  uint64_t count[16];
  uint64_t stride[16];
} mr_view;

/* Options of one engine; get the defaults from mr_options_default. monarch_rdma/config.py documents each one. */
typedef struct {
  const char* name;      /* this process's name; "" = host:pid */
  const uint8_t* secret; /* job secret, at least 16 bytes; NULL = random, nobody can join */
  uint64_t secret_len;
  const char* listen_host;     /* address or interface name to listen on */
  const char* advertise_host;  /* address told to others; "" = the one listened on */
  uint32_t port_min, port_max; /* TCP port range; 0,0 = any */
  uint32_t ip_family;          /* 0 = either, 4, 6 */
  const char* lanes;           /* comma list of allowed lanes, best first: "shm,verbs,tcp" */
  uint32_t same_host_unix;     /* 1: Unix socket control stream to peers on this host; 0: always TCP with TLS */
  const char* unix_socket_dir; /* where that socket has a file too, for other network namespaces; "" = nowhere */
  uint32_t shm_mapped;         /* 1: map the peer's shared memory */
  uint32_t shm_process_vm;     /* 1: process_vm_readv/writev for memory that is not shared */
  const char* allow_ptrace;    /* who may read our memory where Yama asks: "no", "job" (peers on this host), "any" */
  uint32_t bulk_tls;           /* 1: TLS on tcp lane data sockets too */
  uint32_t tcp_sockets;        /* data sockets per peer for large transfers */
  uint32_t tcp_sockets_far;    /* as many at most where the round trip is long: one fills its buffers only */
  uint32_t copy_threads;       /* threads for large same-host copies; 0 = chosen from the cores */
  const char* verbs_devices;   /* RDMA cards to use, in the order of rails: "mlx5_0,mlx5_1:1,bnxt_re*"; "" = chosen */
  int32_t verbs_gid_index;     /* entry of the GID table to use on RoCE ports; -1 = chosen */
  uint32_t verbs_queue_pairs;  /* queue pairs per peer and rail; the first is for small operations */
  uint32_t verbs_max_queue_pairs; /* queue pairs of this engine, those that peers asked for included */
  uint32_t verbs_depth;           /* work requests at a time on one queue pair */
  uint64_t verbs_chunk_bytes;     /* most bytes of one work request */
  uint32_t verbs_min_run;         /* remote runs shorter than this many bytes go over tcp, whose owner packs them */
  uint32_t verbs_inline_bytes;    /* writes up to this size go inside of the request, where the card can */
  uint32_t verbs_rd_atomic;       /* reads and atomics at a time on one queue pair */
  uint32_t verbs_mtu;             /* of packets; 0 = the ports' */
  uint32_t verbs_timeout;         /* 4.096 us * 2^timeout until a packet counts as lost; 0 = never */
  uint32_t verbs_retries;         /* times a lost packet is sent again; 7 = for ever on some cards */
  uint32_t verbs_rnr_retries;     /* times a packet is sent again to a receiver that is not ready; 7 = for ever */
  uint32_t verbs_rnr_timer;       /* code of the pause before that */
  uint32_t verbs_traffic_class;   /* of RoCE packets: DSCP * 4 + ECN */
  uint32_t verbs_service_level;   /* of InfiniBand packets; priority of RoCE ones */
  uint32_t verbs_hop_limit;
  uint32_t verbs_pkey_index;
  double verbs_spin;             /* how long a thread polls before it sleeps */
  uint64_t verbs_cache_bytes;    /* registered local memory that is kept while no operation uses it */
  uint32_t verbs_on_demand;      /* 1: on-demand paging instead of pinning local memory, where the card can */
  uint32_t verbs_atomics;        /* 1: the card's atomics: not atomic against those of processors and other cards */
  double loop_spin;              /* how long the loop's thread looks for events before it sleeps, where that pays off */
  uint64_t max_frame_bytes;      /* largest control frame accepted */
  uint64_t message_window_bytes; /* unread message bytes a peer may have outstanding here */
  uint32_t max_pending_ops;      /* operations in flight per engine */
  double heartbeat_interval;
  double heartbeat_timeout;
  double connect_timeout;
  double drop_timeout;       /* how long a drop waits for accesses in flight */
  uint32_t protocol_version; /* 0 = current; tests talk an older or newer one */
} mr_options;

typedef struct mr_engine mr_engine;
typedef struct mr_region mr_region; /* ours: what others may reach */
typedef struct mr_remote mr_remote; /* theirs: an opened handle */
typedef struct mr_op mr_op;
typedef struct mr_completions mr_completions;

/* What one operation did. */
typedef struct {
  int32_t kind; /* enum mr_kind */
  int32_t sys_errno;
  int32_t remote_state; /* enum mr_remote_state, for writes */
  uint32_t chunks;      /* pieces it was moved in */
  uint32_t rails;       /* sockets, threads or cards that moved bytes */
  uint32_t retries;     /* pieces that were posted again */
  uint64_t bytes;
  uint64_t value;    /* the old value, for atomics */
  double seconds;    /* from submission to completion */
  char lane[16];     /* "shm-mapped", "shm-process_vm", "local", "verbs", "tcp", "ipc", "staged-tcp", .., "" */
  char skipped[256]; /* why better lanes were not used */
  char message[1024];
} mr_result;

const char* mr_version(void);
uint32_t mr_protocol_version(void);

void mr_options_default(mr_options* options);
int mr_engine_create(const mr_options* options, mr_engine** engine, mr_error* error);
/* Ends every pending operation with MR_CANCELLED, says goodbye to peers, frees everything. Remote and region
 * handles stay valid to be closed; what else is asked of them returns MR_CONFIG. Shared and mapped memory
 * stays as long as one of these handles is held. */
void mr_engine_close(mr_engine* engine);
/* The string another process needs to find this engine (no secret in it); valid until close. */
const char* mr_engine_address(mr_engine* engine);
const char* mr_engine_name(mr_engine* engine);
uint64_t mr_engine_incarnation(mr_engine* engine);

/* Memory that peers on this host can map: a sealed memfd, hugepage-friendly, zeroed. NULL on failure. */
void* mr_shared_alloc(mr_engine* engine, uint64_t size, mr_error* error);
/* Unmaps. Regions on it must be dropped first (MR_CONFIG otherwise). Peers that still map it keep the pages, not access
 * to ours. */
int mr_shared_free(mr_engine* engine, void* address, mr_error* error);

/* Promises that [address, address + size) stays mapped to the same pages until it is forgotten, so that cards may keep
 * it registered between operations (option verbs_cache_bytes). Memory of regions is kept until they are dropped. */
int mr_memory_keep(mr_engine* engine, const void* address, uint64_t size, mr_error* error);
/* Before the memory is freed; as often as it was kept. */
void mr_memory_forget(mr_engine* engine, const void* address, uint64_t size);

/* Makes [address, address + size) reachable. The caller keeps the memory alive until the drop has completed. */
int mr_region_create(mr_engine* engine, void* address, uint64_t size, uint32_t access, mr_region** region,
                     mr_error* error);
/* The same for memory of a GPU, all of it of one device, known to the runtime that this process has loaded. */
int mr_region_create_on_device(mr_engine* engine, void* address, uint64_t size, uint32_t access, mr_region** region,
                               mr_error* error);
/* The bytes that another process opens with mr_remote_open. Returns the length; copies at most `capacity`. */
uint64_t mr_region_descriptor(mr_region* region, uint8_t* out, uint64_t capacity);
uint64_t mr_region_id(mr_region* region);
/* Next notification that writers attached to this region: 1 = got one, 0 = none within the timeout, negative =
 * -mr_kind. */
int mr_region_notification(mr_region* region, double timeout, uint64_t* value, mr_error* error);
/* Puts `tag` into the queue once: when there is a notification, or the region is dropped (at once where it is so). */
void mr_region_notified(mr_region* region, mr_completions* queue, uint64_t tag);
/* Ends remote access at once; the operation is done when no access is in flight. MR_TRANSFER_TIMEOUT after
 * drop_timeout: then a peer is still in the memory, and the caller keeps it alive until mr_region_dropped. Again, or
 * after a peer asked for the drop, it is no error. */
int mr_region_drop(mr_region* region, mr_op** op, mr_error* error);
/* 1 once remote access has ended and the memory is no longer touched (a peer may have dropped it). */
int mr_region_dropped(mr_region* region);
/* Frees the handle, not the region: drop it first. */
void mr_region_close(mr_region* region);

int mr_remote_open(mr_engine* engine, const uint8_t* descriptor, uint64_t length, mr_remote** remote, mr_error* error);
void mr_remote_close(mr_remote* remote);
uint64_t mr_remote_size(mr_remote* remote);
uint32_t mr_remote_access(mr_remote* remote);
const char* mr_remote_owner(mr_remote* remote); /* owner's name */
uint64_t mr_remote_incarnation(mr_remote* remote);
/* The lane a transfer would take now: connects if needed, within the timeout. Static string, "" with *error set if
 * none. */
const char* mr_remote_lane(mr_remote* remote, double timeout, mr_error* error);

/* Starts one transfer between local memory (local_view relative to `local`) and the remote region.
 * Both views must have the same number of bytes. verb is MR_READ or MR_WRITE. The caller keeps `local` alive until
 * the operation is done. For a write, has_notify posts `notify` to the region after all its bytes are visible there. */
int mr_transfer(mr_remote* remote, uint32_t verb, void* local, const mr_view* local_view, const mr_view* remote_view,
                double timeout, uint32_t flags, uint32_t has_notify, uint64_t notify, mr_op** op, mr_error* error);
/* The same for one contiguous range. */
int mr_transfer_bytes(mr_remote* remote, uint32_t verb, void* local, uint64_t remote_offset, uint64_t length,
                      double timeout, uint32_t flags, mr_op** op, mr_error* error);
/* Checksums of the blocks of a read (kernels/kernels.h): its first byte is byte `first` of `total` that are cut into
 * blocks of `block_bytes`. Its sums come after one word, which counts the bytes that are in them: those of the read
 * where its lane copies or receives them itself; else, or where some came twice, the sums are the caller's to make. Of
 * a block that the read has a part of it makes a part of its sum; the parts add up to it (mod 2^64). */
typedef struct {
  uint64_t first, total;
  uint64_t block_bytes;
  uint64_t* sums; /* 1 + as many as the read touches blocks; the caller keeps them until the operation is done */
} mr_block_sums;
/* Reads one contiguous range, and makes checksums as the bytes pass. first and block_bytes are multiples of 8, and so
 * is length, unless the read ends at `total`. */
int mr_read_with_sums(mr_remote* remote, void* local, uint64_t remote_offset, uint64_t length, double timeout,
                      uint32_t flags, const mr_block_sums* sums, mr_op** op, mr_error* error);
/* The same within this process: done, on as many threads as option copy_threads says, when it returns. `to` and `from`
 * do not overlap; `to` NULL: nothing is copied. */
int mr_copy_with_sums(mr_engine* engine, void* to, const void* from, uint64_t length, const mr_block_sums* sums,
                      mr_error* error);
/* mr_transfer_bytes, without an operation where it ends in success before this returns. Above 0: it has; see mr_moved.
 * 0: *op is the operation, in flight or failed. Negative: -mr_kind, nothing was started. `local` is an address. */
int64_t mr_move_bytes(mr_remote* remote, uint32_t verb, uint64_t local, uint64_t remote_offset, uint64_t length,
                      double timeout, uint32_t flags, mr_op** op, mr_error* error);
/* What a result above 0 of mr_move_bytes tells: the lane, as in mr_result, and the seconds it took. */
const char* mr_moved(int64_t moved, double* seconds);
/* The order of a transfer in a stream of a GPU. `stream` is the runtime's (NULL: the default stream); the transfer
 * begins when what was queued on it so far has ended. signal != 0: what is queued on it later waits until the transfer
 * has ended, in whatever way; the stream's owner must look at the result. `device`: whose stream it is; -1: the device
 * of `local`. */
typedef struct {
  void* stream;
  int32_t device;
  uint32_t signal;
  uint32_t local_on_device; /* 1: `local` is memory of a GPU; 0: of the host */
} mr_stream_order;
/* mr_transfer in the order of a stream, for memory of GPUs and of the host. */
int mr_transfer_ordered(mr_remote* remote, uint32_t verb, void* local, const mr_view* local_view,
                        const mr_view* remote_view, double timeout, uint32_t flags, uint32_t has_notify,
                        uint64_t notify, const mr_stream_order* order, mr_op** op, mr_error* error);
/* Waits until what was queued on the stream of `device` (-1: this thread's current one) has ended. */
int mr_gpu_synchronize(int32_t device, void* stream, mr_error* error);
/* 64-bit, offset a multiple of 8; the old value is in the result. Not in memory of a GPU. */
int mr_fetch_add(mr_remote* remote, uint64_t offset, uint64_t add, double timeout, mr_op** op, mr_error* error);
int mr_compare_and_swap(mr_remote* remote, uint64_t offset, uint64_t compare, uint64_t swap, double timeout, mr_op** op,
                        mr_error* error);
/* Asks the owner to drop the region. */
int mr_remote_drop(mr_remote* remote, double timeout, mr_op** op, mr_error* error);
/* Maps the region's memory here: *address is valid until mr_remote_unmap. Only for memory from mr_shared_alloc on this
 * host. */
int mr_remote_map(mr_remote* remote, double timeout, void** address, uint32_t* writable, mr_error* error);
/* The same for memory of a GPU of this host that another process owns: *address is where `device` (-1: this thread's
 * current one) and its kernels reach it. The owner's drop waits until it is unmapped. MR_CONFIG, which says why, where
 * it can't be opened: another host, no IPC, devices that don't reach each other. */
int mr_remote_map_on_device(mr_remote* remote, int32_t device, double timeout, void** address, mr_error* error);
int mr_remote_unmap(mr_remote* remote, void* address, mr_error* error);

/* Starts finished reads and writes (of this engine) once more, each as it was described, with the same local memory;
 * what is known of the last run is forgotten. Returns how many have not ended in success by now: look at each.
 * Negative: nothing was started; -MR_RESOURCE_EXHAUSTED where one is not finished yet or not let go of by the engine,
 * which passes: start it anew. */
int mr_restart(mr_engine* engine, mr_op* const* ops, uint32_t count, double timeout, mr_error* error);
/* Waits: 1 = done, 0 = not done within the timeout. */
int mr_op_wait(mr_op* op, double timeout);
int mr_op_done(mr_op* op);
/* Asks for an early end. Once the operation is done (wait for it), its local destination is not written any more. */
void mr_op_cancel(mr_op* op);
/* Kind of a done operation; fills *result if not NULL. MR_CONFIG if it is not done. */
int mr_op_result(mr_op* op, mr_result* result);
void mr_op_release(mr_op* op);

/* A queue of finished operations with a file descriptor that is readable while it is not empty (for asyncio). */
int mr_completions_create(mr_engine* engine, mr_completions** queue, mr_error* error);
int mr_completions_fd(mr_completions* queue);
/* Puts `tag` into the queue when op is done (at once if it is). One queue per operation. */
int mr_completions_add(mr_completions* queue, mr_op* op, uint64_t tag);
/* Takes up to `capacity` tags; returns how many. */
uint64_t mr_completions_take(mr_completions* queue, uint64_t* tags, uint64_t capacity);
void mr_completions_close(mr_completions* queue);

/* Connects to an engine by its address; the operation is done when both sides have proved membership. */
int mr_connect(mr_engine* engine, const char* address, double timeout, mr_op** op, mr_error* error);
/* An operation that ends only when the peer is lost (or it is cancelled): heartbeats run while it is pending. */
int mr_watch(mr_engine* engine, const char* address, mr_op** op, mr_error* error);

/* Names: a blob published under a name is served by the engine's own thread. */
int mr_publish(mr_engine* engine, const char* name, const uint8_t* data, uint64_t length, mr_error* error);
int mr_unpublish(mr_engine* engine, const char* name, mr_error* error);
/* Fetches a blob: waits for it. Returns MR_OK and the length in *length; copies at most capacity bytes. MR_CONFIG if
 * there is no such name. */
int mr_lookup(mr_engine* engine, const char* address, const char* name, double timeout, uint8_t* out, uint64_t capacity,
              uint64_t* length, mr_error* error);

/* Messages: bytes from engine to engine, in order. What a peer's messages take up here unread is
 * bounded by message_window_bytes; a sender waits while its window is full. */

/* Another engine, to send to. Opening one connects nothing, and costs more than a send. */
typedef struct mr_peer mr_peer;
int mr_peer_open(mr_engine* engine, const char* address, mr_peer** peer, mr_error* error);
void mr_peer_close(mr_peer* peer);
/* Sends head and body, one of which may be empty, as one message. Connects if need be. MR_OK: it is on its way, which
 * ends with this process or the peer, not that it has arrived. MR_TRANSFER_TIMEOUT: nothing was sent; a timeout of 0
 * never waits. A thread that has the inbox's turn had better not wait here: the messages that it
 * keeps from being read may be those that the peer waits for. */
int mr_peer_send(mr_peer* peer, const uint8_t* head, uint64_t head_length, const uint8_t* body, uint64_t body_length,
                 double timeout, mr_error* error);
/* Heartbeats to the peer, until it is lost: its loss becomes one notice in our inbox, after all that the peer sent.
 * Without heartbeats only the kernels tell: of the end of its process, or of the connection. Watching what is watched
 * changes that; unwatching what is not watched is no error. */
int mr_peer_watch(mr_peer* peer, int heartbeats, mr_error* error);
int mr_peer_unwatch(mr_peer* peer, mr_error* error);

/* Puts a fault (enum mr_fault) on the connection to a peer on purpose, on this side, as a broken network would: on its
 * control stream and the sockets of the tcp lane, for `seconds` where it lasts. MR_PEER_LOST where there is no
 * connection. */
int mr_peer_fault(mr_engine* engine, const char* address, uint32_t fault, double seconds, double amount,
                  mr_error* error);

/* Ends takes early: sticky until it is cleared. */
typedef struct mr_stop mr_stop;
mr_stop* mr_stop_create(void);
void mr_stop_set(mr_stop* stop);
void mr_stop_clear(mr_stop* stop);
int mr_stop_is_set(mr_stop* stop);
void mr_stop_free(mr_stop* stop);

/* The engine's inbox. One thread at a time has the turn: who took a batch, until it takes again or is done. */
typedef struct mr_inbox mr_inbox;
/* What stands before each entry of a batch; its sender's address and its data follow, without padding. */
typedef struct {
  int32_t kind; /* MR_OK: a message; else enum mr_kind: the sender is lost, data says why */
  uint32_t sender_length;
  uint64_t data_length;
} mr_incoming;
int mr_inbox_open(mr_engine* engine, mr_inbox** inbox, mr_error* error);
void mr_inbox_close(mr_inbox* inbox);
/* Takes what has arrived, up to some hundred entries; waits for the first. Returns how many, 0 at the timeout or where
 * the stop (may be NULL) is set, negative = -mr_kind. *data is valid until this thread's next take or done. Who waits
 * here handles the engine's events itself; background != 0: unless another thread would. */
int mr_inbox_take(mr_inbox* inbox, double timeout, mr_stop* stop, uint32_t background, const char** data,
                  uint64_t* length, mr_error* error);
/* Gives the turn back, if this thread has it. put_back != 0: the batch was not read; the next one takes it again. */
void mr_inbox_done(mr_inbox* inbox, uint32_t put_back);

/* Groups: engines with the ranks 0 to size-1 that call the same collectives in the same order, from any thread, one at
 * a time, and send each other messages. Members on one host do so in memory that all of them map, others by one-sided
 * writes. When a member is lost, or gives up, everything that is pending in the group ends on all of them with an error
 * that names its rank, and so does all that is called later. */
typedef struct mr_group mr_group;

enum mr_collective_kind {
  MR_BARRIER = 0,
  MR_BROADCAST = 1,      /* inputs[0] of root to outputs[0] of all others */
  MR_ALL_REDUCE = 2,     /* over inputs[0] of all, to outputs[0] of all, which may be the same memory */
  MR_REDUCE = 3,         /* the same, to outputs[0] of root alone */
  MR_REDUCE_SCATTER = 4, /* over inputs[r] of all, to outputs[0] of rank r, which may be its inputs[r] */
  MR_ALL_GATHER = 5,     /* inputs[0] of rank r to outputs[r] of all, which may be the same memory there */
  MR_GATHER = 6,         /* inputs[0] of rank r to outputs[r] of root */
  MR_SCATTER = 7,        /* inputs[r] of root to outputs[0] of rank r */
  MR_ALL_TO_ALL = 8      /* inputs[r] of rank s to outputs[s] of rank r */
};
/* How the bytes go between members, and in which order sums are made: docs/collectives.md. */
enum mr_collective_algorithm { MR_DIRECT = 0, MR_DOUBLING = 1, MR_HALVING = 2, MR_RING = 3, MR_TREE = 4 };
/* In the order of ranks where the algorithm is MR_DIRECT; floating types in fp32 (fp64 in fp64). See
 * csrc/kernels/kernels.h. */
enum mr_reduction { MR_SUM = 0, MR_AVG = 1, MR_MIN = 2, MR_MAX = 3, MR_PRODUCT = 4 };

/* Asked by a thread whose wait was interrupted by a signal, in that thread: not 0 makes it give up, with MR_CANCELLED.
 */
typedef int (*mr_interrupted)(void);

typedef struct {
  uint32_t rank, size;
  uint64_t step_bytes;        /* that a member stages at a time; the same on all members, as the next one */
  uint64_t message_bytes;     /* of a part of a message */
  uint64_t choices;           /* a digest of whatever else all members must have alike */
  uint32_t spin;              /* times that a waiter looks before it sleeps */
  mr_interrupted interrupted; /* may be NULL */
} mr_group_options;

/* One collective. Sizes are bytes; where one is not said to be free by the kind, all members have the same. */
typedef struct {
  uint32_t kind;      /* enum mr_collective_kind */
  uint32_t dtype;     /* enum mr_dtype of csrc/kernels/float_formats.h; used by those that reduce */
  uint32_t reduction; /* enum mr_reduction */
  uint32_t root;
  uint32_t num_inputs, num_outputs;
  const void* const* inputs;
  const uint64_t* input_bytes;
  void* const* outputs;
  const uint64_t* output_bytes;
  uint32_t divisor;   /* what MR_AVG divides the sum by; 0: the number of members */
  uint32_t algorithm; /* enum mr_collective_algorithm; the same on all members */
} mr_collective;

int mr_group_create(mr_engine* engine, const mr_group_options* options, mr_group** group, mr_error* error);
/* The bytes that the other members join with. Returns the length; copies at most `capacity`. */
uint64_t mr_group_descriptor(mr_group* group, uint8_t* out, uint64_t capacity);
/* Meets the other members, given all descriptors in the order of ranks: returns when all have met us. */
int mr_group_join(mr_group* group, const uint8_t* const* descriptors, const uint64_t* lengths, double timeout,
                  mr_error* error);
/* Whether this kind of collective can go by this algorithm. */
int mr_collective_has(uint32_t kind, uint32_t algorithm);
/* Carries it out. Bad arguments (MR_CONFIG) change nothing; with any other error the group has failed. */
int mr_group_run(mr_group* group, const mr_collective* collective, double timeout, mr_error* error);
/* Messages, by tag: between two members those with one tag arrive in order. Sending returns when the bytes may be
 * changed. MR_TRANSFER_TIMEOUT: nothing was sent, or taken. */
int mr_group_send(mr_group* group, uint32_t to, int64_t tag, const void* data, uint64_t bytes, double timeout,
                  mr_error* error);
/* From rank `from`, or from anybody (-1): *sender says from whom. MR_OUT_OF_BOUNDS where the message has another size;
 * it is gone then. */
int mr_group_receive(mr_group* group, int64_t from, int64_t tag, void* data, uint64_t bytes, double timeout,
                     uint32_t* sender, mr_error* error);
/* Makes the group fail, on all members. */
int mr_group_abort(mr_group* group, const char* reason, mr_error* error);
/* MR_OK, or the kind of what made it fail; then *rank (may be NULL) is the member named by it. */
int mr_group_failure(mr_group* group, int64_t* rank, mr_error* error);
/* Makes the group's collectives fail, on all members, because this one has left. */
void mr_group_lack(mr_group* group, uint32_t rank);
/* 1 where this member is lost, or has left, as far as we know. */
int mr_group_is_lost(mr_group* group, uint32_t rank);
/* Leaves the group. What is pending here ends with MR_CANCELLED. The others get what this member has given so far; what
 * needs more of it ends there at once, with MR_PEER_LOST: a message alone, or all collectives. */
void mr_group_close(mr_group* group);
/* Frees the handle, when nothing is pending any more. */
void mr_group_free(mr_group* group);

/* Counters since creation, as a JSON object (operations by lane, bytes, retries, peers, regions, loop wake-ups). */
uint64_t mr_engine_counters(mr_engine* engine, char* out, uint64_t capacity);

/* RDMA cards of this host, which of their ports would carry traffic, and why, as a JSON object; the arguments are those
 * options of an engine. Opens each card for a moment. Returns the length; copies at most `capacity`, with a 0 at the
 * end. */
uint64_t mr_verbs_describe(const char* devices, int32_t gid_index, uint32_t ip_family, char* out, uint64_t capacity);

/* The GPU runtime that this process uses, its devices and what it can do, as a JSON object. load != 0: loads the
 * installed one where none is loaded yet, which may make contexts on the devices. Returns the length; copies at most
 * `capacity`, with a 0 at the end. */
uint64_t mr_gpu_describe(uint32_t load, char* out, uint64_t capacity);

/* cffi: end */

/* Called on the loop (by its thread, or by one that waits for an operation) instead of filling the inbox; must not
 * block. */
typedef void (*mr_message_handler)(void* context, const char* sender, const uint8_t* data, uint64_t length);
void mr_message_set_handler(mr_engine* engine, mr_message_handler handler, void* context);
/* Like mr_peer_send, from inside a handler: replies to the sender of the message being handled; never waits. */
int mr_message_reply(mr_engine* engine, const uint8_t* data, uint64_t length, mr_error* error);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
