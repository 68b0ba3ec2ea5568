/* kvgrpc for engines that are not Python: an engine's ranks and its scheduler, on the session socket of their lead.
 *
 * The lead (`kvgrpc serve`) makes the pool, which is shared memory, and moves the bytes; or the ranks bring memory of
 * the engine's own, and move the bytes themselves. A rank reports the engine's steps, and comes back with its memory
 * when another lead takes a dead one's place. A scheduler attaches the engine, hands blocks over, pulls and pushes, and
 * reads what became of it. Library and lead are of one release: the session's schema, unlike that of the public API,
 * may change with each.
 *
 * Threads. The library has no state beside its handles, but for one: which processes may read this one where Yama lets
 * only parents do it (PR_SET_PTRACER), which the kernel keeps once for a process. It starts no thread, except two for
 * each rank that brings its memory, which block all signals. Different handles may be used by different threads. A
 * kvgrpc_engine is used by one thread at a time. Of a kvgrpc_rank, one thread runs kvgrpc_rank_serve, and any thread
 * may report steps, or stop it, meanwhile; kvgrpc_rank_close comes after all of them.
 *
 * Forks. Descriptors are closed by exec. A child that goes on without exec keeps the session open beyond the end of its
 * parent: fork before you attach.
 *
 * Errors. Every call that can fail returns a code, and says more in `error`, which may be NULL. A call that fails has
 * changed nothing, except where it says so. Nothing throws, exits or raises a signal.
 */
#ifndef KVGRPC_ENGINE_H
#define KVGRPC_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Codes are those of gRPC. */
typedef enum kvgrpc_code {
  KVGRPC_OK = 0,
  KVGRPC_CANCELLED = 1,
  KVGRPC_UNKNOWN = 2,
  KVGRPC_INVALID_ARGUMENT = 3,
  KVGRPC_DEADLINE_EXCEEDED = 4,
  KVGRPC_NOT_FOUND = 5,
  KVGRPC_ALREADY_EXISTS = 6,
  KVGRPC_PERMISSION_DENIED = 7,
  KVGRPC_RESOURCE_EXHAUSTED = 8,
  KVGRPC_FAILED_PRECONDITION = 9,
  KVGRPC_ABORTED = 10,
  KVGRPC_OUT_OF_RANGE = 11,
  KVGRPC_UNIMPLEMENTED = 12,
  KVGRPC_INTERNAL = 13,
  KVGRPC_UNAVAILABLE = 14,
  KVGRPC_DATA_LOSS = 15,
  KVGRPC_UNAUTHENTICATED = 16
} kvgrpc_code;

#define KVGRPC_MESSAGE_BYTES 512
#define KVGRPC_ID_BYTES 256

typedef struct kvgrpc_error {
  kvgrpc_code code;
  uint32_t reason; /* Number of a kvgrpc.v1.FailureReason; 0: none. */
  char message[KVGRPC_MESSAGE_BYTES]; /* One sentence for people. */
} kvgrpc_error;

/* Return short names such as "UNAVAILABLE" and "PEER_LOST"; "UNKNOWN" for numbers that this release does not know. */
const char *kvgrpc_code_name(kvgrpc_code code);
const char *kvgrpc_reason_name(uint32_t reason);
/* Returns the version of the library. */
const char *kvgrpc_engine_version(void);

/* Bytes that the caller owns, and the call only reads. */
typedef struct kvgrpc_bytes {
  const void *data;
  size_t size;
} kvgrpc_bytes;

/* ---- a rank */

/* What a scheduler gives its workers, over the engine's own channels. `secret` lets its holder join the engine. */
typedef struct kvgrpc_ticket {
  const char *socket_path;
  kvgrpc_bytes secret;
  /* Time that a rank whose lead died waits for the next one, in seconds; 0: it does not wait. */
  double comes_back_s;
  /* Size of the memory that each rank brings, in bytes; 0 where stages differ, or to check nothing. */
  uint64_t memory_bytes;
} kvgrpc_ticket;

/* Memory of the engine's own. */
typedef struct kvgrpc_memory {
  void *data;
  size_t size;
} kvgrpc_memory;

typedef struct kvgrpc_rank kvgrpc_rank;

/* Attaches one rank and maps its pool. From then on the end of this process ends the engine's life.
 *
 * Errors: UNAVAILABLE where no lead answers, PERMISSION_DENIED (NOT_OWNER) for another engine's ticket, ALREADY_EXISTS
 * (ENGINE_ATTACHED) if the rank has a worker, FAILED_PRECONDITION (POOL_KIND_MISMATCH) if the engine's memory is not
 * shared, or what came is no pool. */
kvgrpc_code kvgrpc_rank_attach(const kvgrpc_ticket *ticket, uint32_t rank, kvgrpc_rank **made, kvgrpc_error *error);

/* Attaches one rank with the memory that it brings, for an engine that attached with `private_memory`. The pool's
 * linear offsets run through `memory`, 1 to 8,192 segments of host memory, in order. Keep the memory where it is until
 * kvgrpc_rank_close returns, and write none of it that a transfer has.
 *
 * Peers of this user on this host read it (path cma), and the rank reads theirs (cma, and shm where theirs is shared).
 * No peer writes into it.
 *
 * Errors: as for kvgrpc_rank_attach, and INVALID_ARGUMENT for what is no memory; FAILED_PRECONDITION
 * (POOL_KIND_MISMATCH), too, if it has not the pool's size, or if the engine's memory is shared; RESOURCE_EXHAUSTED
 * (POOL_EXHAUSTED) without threads or a socket. */
kvgrpc_code kvgrpc_rank_attach_memory(const kvgrpc_ticket *ticket, uint32_t rank, const kvgrpc_memory *memory,
                                      size_t count, kvgrpc_rank **made, kvgrpc_error *error);

/* Return the pool of the rank, which is writable and stays where it is until kvgrpc_rank_close; NULL, and the size, for
 * a rank that brought its memory. */
void *kvgrpc_rank_memory(const kvgrpc_rank *rank);
size_t kvgrpc_rank_memory_bytes(const kvgrpc_rank *rank);

/* Reports that all work of the engine's steps up to `step` is done on this rank. First wait for device work that a
 * later kernel must not overtake. While a lead is being replaced, the next one gets the report.
 *
 * Errors: UNAVAILABLE (PEER_LOST) when the engine's life is over. */
kvgrpc_code kvgrpc_rank_step_done(kvgrpc_rank *rank, uint64_t step, kvgrpc_error *error);
/* The same for some layers only: parts of a push that cover only these layers can move. */
kvgrpc_code kvgrpc_rank_layers_done(kvgrpc_rank *rank, uint64_t step, uint32_t first, uint32_t count,
                                    kvgrpc_error *error);

/* Takes what the lead says, and attaches to the next lead after the death of one, until the engine's life is over or
 * kvgrpc_rank_stop is called. A rank needs a thread that runs this from its attach on.
 *
 * Returns KVGRPC_OK after a stop. Errors: UNAVAILABLE (PEER_LOST) at the end of the engine's life. The memory stays
 * mapped and readable, the engine attaches anew. INTERNAL (DATA_PATH_FAILED) if the next lead refused this rank:
 * a peer may still write into the memory, or a copy that an earlier lead commanded has not ended. */
kvgrpc_code kvgrpc_rank_serve(kvgrpc_rank *rank, kvgrpc_error *error);
/* Ends kvgrpc_rank_serve, now and later. It may be called in a signal handler. */
void kvgrpc_rank_stop(kvgrpc_rank *rank);
/* Detaches the rank, which ends the engine's life, and unmaps the pool. It waits for the call at work of a rank that
 * brought its memory: nothing is read or written there by this process once it returned, and what peers still read
 * counts for nothing. The wait has no bound if a peer's memory is a mapping of a file and the daemon of its file system
 * (FUSE) never answers. Connecting such a peer stops the rank's connecting of others, its answers to peers and its
 * reports of their ends, too. NULL is allowed. */
void kvgrpc_rank_close(kvgrpc_rank *rank);

/* ---- what a pool is */

typedef enum kvgrpc_group_kind {
  KVGRPC_GROUP_FULL_ATTENTION = 1,
  KVGRPC_GROUP_SLIDING_WINDOW = 2,
  KVGRPC_GROUP_MLA = 3,
  KVGRPC_GROUP_STATE = 4
} kvgrpc_group_kind;

typedef enum kvgrpc_tensor_kind {
  KVGRPC_TENSOR_KV = 1,
  KVGRPC_TENSOR_K = 2,
  KVGRPC_TENSOR_V = 3,
  KVGRPC_TENSOR_LATENT = 4,
  KVGRPC_TENSOR_STATE = 5
} kvgrpc_tensor_kind;

typedef enum kvgrpc_block_order { KVGRPC_TOKEN_MAJOR = 1, KVGRPC_HEAD_MAJOR = 2 } kvgrpc_block_order;

/* Layers that use their blocks in one way; fields as in kvgrpc.v1.Group. Texts may be NULL, which means empty. */
typedef struct kvgrpc_group {
  const char *name;
  kvgrpc_group_kind kind;
  uint32_t layers;
  uint32_t block_tokens;
  uint32_t blocks;
  uint32_t kv_heads; /* On each rank. */
  uint32_t head_dim;
  const char *dtype;
  kvgrpc_block_order order;
  uint32_t window_tokens;
  const char *space;
  uint32_t total_kv_heads;
} kvgrpc_group;

/* Place of the elements of a block, as in kvgrpc.v1.BlockStrides. */
typedef struct kvgrpc_strides {
  uint64_t layer_bytes;
  uint64_t values_bytes;
  uint64_t head_bytes;
  uint64_t token_bytes;
  uint64_t key_element_bytes;
} kvgrpc_strides;

/* Where layers of a group lie in the memory of a rank, as in kvgrpc.v1.Region. */
typedef struct kvgrpc_region {
  uint32_t group;
  uint32_t first_layer;
  uint32_t layers;
  uint64_t offset;
  uint64_t stride_bytes;
  uint64_t block_bytes;
  kvgrpc_tensor_kind tensor;
  const kvgrpc_strides *strides; /* NULL: elements lie side by side. */
  uint32_t stage;
} kvgrpc_region;

typedef struct kvgrpc_pool {
  const kvgrpc_group *groups;
  size_t group_count; /* At most 256. */
  const kvgrpc_region *regions;
  size_t region_count; /* At most 4,096. */
  uint64_t total_bytes;
} kvgrpc_pool;

/* ---- a scheduler */

typedef struct kvgrpc_engine kvgrpc_engine;

typedef struct kvgrpc_attach_options {
  const char *socket_path;
  const kvgrpc_pool *pool;      /* NULL takes the lead's configured pool. */
  const char *engine_id;        /* NULL or empty keeps the lead's. */
  const char *weights_revision; /* Engines of different revisions exchange nothing. */
  uint32_t world_size;          /* Number of ranks; 0 means 1. */
  bool cannot_set_aside;        /* As in AttachRequest. */
  bool expects_pushes;          /* KVGRPC_EVENT_PUSH_WANTED comes, for kvgrpc_push_expect. */
  bool private_memory;          /* Ranks bring their memory: kvgrpc_rank_attach_memory. `pool` is not NULL. */
} kvgrpc_attach_options;

/* Attaches an engine that manages its own blocks to a running lead. The ranks attach afterwards.
 *
 * Errors: UNAVAILABLE where no lead answers, INVALID_ARGUMENT for the pool, RESOURCE_EXHAUSTED (POOL_EXHAUSTED) if it
 * does not fit, ALREADY_EXISTS (ENGINE_ATTACHED). */
kvgrpc_code kvgrpc_engine_attach(const kvgrpc_attach_options *options, kvgrpc_engine **made, kvgrpc_error *error);

/* Return what the lead told; it lives as long as the handle. A lead that the engine did not start is not replaced, so
 * the ticket's `comes_back_s` is 0; an engine that is started anew with the lead attaches anew. */
const kvgrpc_ticket *kvgrpc_engine_ticket(const kvgrpc_engine *engine);
const char *kvgrpc_engine_id(const kvgrpc_engine *engine);
const char *kvgrpc_engine_address(const kvgrpc_engine *engine);
uint64_t kvgrpc_engine_incarnation(const kvgrpc_engine *engine);
/* Returns a descriptor for an event loop, readable when the lead said something. Before you wait for it, call
 * kvgrpc_engine_next with no timeout until it has nothing. */
int kvgrpc_engine_fileno(const kvgrpc_engine *engine);

/* One transfer, from the call that made it until its last event; 0 is none. */
typedef uint64_t kvgrpc_transfer;

/* What KV is of: token ids and what else it depends on, or an opaque id for `opaque_tokens` tokens. */
typedef struct kvgrpc_content {
  const uint32_t *token_ids;
  size_t token_count;
  const char *adapter;
  const char *cache_salt;
  kvgrpc_bytes opaque_id;
  uint32_t opaque_tokens;
} kvgrpc_content;

/* Blocks of one group, in token order. */
typedef struct kvgrpc_blocks {
  uint32_t group;
  const uint32_t *ids;
  size_t count;
} kvgrpc_blocks;

/* What all transfers have. Those but hand-overs and pushes may leave out the key. */
typedef struct kvgrpc_labels {
  kvgrpc_bytes transfer_key; /* 16 to 64 random bytes. */
  const char *request_id;
  const char *traceparent;
  int32_t priority;
  uint64_t request_time_us; /* Time at which the request began, since the Unix epoch; 0: now. */
} kvgrpc_labels;

typedef struct kvgrpc_hand_over_options {
  double ttl_s;           /* 0: the lead's default. */
  double firm_ttl_s;      /* 0: the lead's default. */
  uint32_t consumers;     /* 0 means 1. */
  bool keeps_on_abort;    /* A consumer that gives up does not end it: another one comes. */
  bool takes_registrations;
  uint64_t after_step;    /* Last step that writes the blocks; 0: they are written. */
} kvgrpc_hand_over_options;

typedef struct kvgrpc_pull_options {
  uint32_t use_tokens;    /* 0: as many as source and content have in common. */
  bool allow_prefix;
} kvgrpc_pull_options;

typedef struct kvgrpc_reserve_options {
  uint32_t have_tokens;
  uint32_t use_tokens;          /* 0: all of the content. */
  const char *source_address;   /* The lead registers there by itself; NULL: the grant is brought to the source. */
  const char *source_engine_id;
  uint64_t after_step;
  bool allow_prefix;
} kvgrpc_reserve_options;

typedef struct kvgrpc_push_options {
  uint32_t consumers;     /* 0 means 1. */
  bool keeps_on_abort;
  double firm_ttl_s;      /* 0: the lead's default. */
} kvgrpc_push_options;

typedef struct kvgrpc_part {
  const kvgrpc_blocks *blocks; /* One row for each group that has blocks. */
  size_t rows;
  uint32_t first_layer;
  uint32_t layers; /* 0: all layers. */
  bool last;
  uint64_t after_step;
} kvgrpc_part;

/* The calls below are queued, and leave with kvgrpc_engine_flush or kvgrpc_engine_next. What the lead refuses comes as
 * KVGRPC_EVENT_FAILED and KVGRPC_EVENT_BLOCKS_RETURNED. Blocks that a call names belong to the transfer until
 * KVGRPC_EVENT_BLOCKS_RETURNED, or KVGRPC_EVENT_RECEIVED. Where `options` is NULL, all of them are 0.
 *
 * Errors of all: UNAVAILABLE (PEER_LOST) at the end of the session, INVALID_ARGUMENT, OUT_OF_RANGE for a call that is
 * too long, FAILED_PRECONDITION (TRANSFER_ENDED) for a transfer that is over or of another kind. */

/* Hands finished blocks over to readers. KVGRPC_EVENT_GRANTED brings the grant for them. */
kvgrpc_code kvgrpc_hand_over(kvgrpc_engine *engine, const kvgrpc_labels *labels, const kvgrpc_content *content,
                             const kvgrpc_blocks *blocks, size_t rows, const kvgrpc_hand_over_options *options,
                             kvgrpc_transfer *made, kvgrpc_error *error);
/* Pulls what a grant offers, holding it from now on. KVGRPC_EVENT_OPENED says how many tokens will be usable;
 * kvgrpc_pull_start gives the blocks, then or before. */
kvgrpc_code kvgrpc_pull(kvgrpc_engine *engine, const kvgrpc_labels *labels, const kvgrpc_content *content,
                        kvgrpc_bytes grant, const kvgrpc_pull_options *options, kvgrpc_transfer *made,
                        kvgrpc_error *error);
/* Gives, once, the blocks for the KV: from the first one that is not wholly held (`have_tokens`) to the one with the
 * last usable token. No blocks: everything was found locally, and the source is released. */
kvgrpc_code kvgrpc_pull_start(kvgrpc_engine *engine, kvgrpc_transfer pull, const kvgrpc_blocks *blocks, size_t rows,
                              uint32_t have_tokens, uint64_t after_step, kvgrpc_error *error);
/* Reserves blocks that a push will fill. KVGRPC_EVENT_GRANTED brings the grant for the source. */
kvgrpc_code kvgrpc_reserve(kvgrpc_engine *engine, const kvgrpc_labels *labels, const kvgrpc_content *content,
                           const kvgrpc_blocks *blocks, size_t rows, const kvgrpc_reserve_options *options,
                           kvgrpc_transfer *made, kvgrpc_error *error);
/* Begins the source's side of a push. Nothing is sent: kvgrpc_push_register and kvgrpc_push_part do that. */
kvgrpc_code kvgrpc_push(kvgrpc_engine *engine, const kvgrpc_labels *labels, const kvgrpc_content *content,
                        const kvgrpc_push_options *options, kvgrpc_transfer *made, kvgrpc_error *error);
/* Registers the destination that made `grant`, unless its lead or a router does so. Once. */
kvgrpc_code kvgrpc_push_register(kvgrpc_engine *engine, kvgrpc_transfer push, kvgrpc_bytes grant, kvgrpc_error *error);
/* Hands one part over: whole blocks that follow those of the same layers handed over before. */
kvgrpc_code kvgrpc_push_part(kvgrpc_engine *engine, kvgrpc_transfer push, const kvgrpc_part *part,
                             kvgrpc_error *error);
/* Starts over after a preemption: earlier parts count no more. KVGRPC_EVENT_PARTS_RETURNED follows the first new one. */
kvgrpc_code kvgrpc_push_start_over(kvgrpc_engine *engine, kvgrpc_transfer push, kvgrpc_error *error);
/* Says that this side cannot deliver: the destination learns it at once, and the push ends. */
kvgrpc_code kvgrpc_push_fail(kvgrpc_engine *engine, kvgrpc_transfer push, const char *message, kvgrpc_error *error);
/* Says that parts will come under a key, so that destinations wait for them. */
kvgrpc_code kvgrpc_push_expect(kvgrpc_engine *engine, kvgrpc_bytes transfer_key, kvgrpc_error *error);
/* Ends a transfer of any kind: a hand-over, too. Its last events follow, except for a push of which nothing was sent:
 * that is over at once. */
kvgrpc_code kvgrpc_cancel(kvgrpc_engine *engine, kvgrpc_transfer transfer, const char *message, kvgrpc_error *error);
/* Ends everything under a key, now and later. */
kvgrpc_code kvgrpc_cancel_key(kvgrpc_engine *engine, kvgrpc_bytes transfer_key, const char *message,
                              kvgrpc_error *error);
/* Reports a step of an engine with one rank whose worker reports none. */
kvgrpc_code kvgrpc_step_done(kvgrpc_engine *engine, uint64_t step, kvgrpc_error *error);

typedef enum kvgrpc_event_kind {
  KVGRPC_EVENT_NONE = 0,            /* Nothing came in time. */
  KVGRPC_EVENT_GRANTED = 1,         /* A hand-over or a reservation has its `grant`. */
  KVGRPC_EVENT_OPENED = 2,          /* A pull knows its `use_tokens`. */
  KVGRPC_EVENT_LAYERS = 3,          /* `layers` of a reservation are there provisionally, in place of earlier ones. */
  KVGRPC_EVENT_RECEIVED = 4,        /* The KV of `use_tokens` is there. The last event. */
  KVGRPC_EVENT_FAILED = 5,          /* `failure` says why. KVGRPC_EVENT_BLOCKS_RETURNED follows. */
  KVGRPC_EVENT_BLOCKS_RETURNED = 6, /* The blocks are the engine's again. The last event. */
  KVGRPC_EVENT_PARTS_RETURNED = 7,  /* The blocks of an earlier epoch of a push are the engine's again. */
  KVGRPC_EVENT_PUSH_WANTED = 8,     /* A destination waits for a push under `transfer_key`. */
  KVGRPC_EVENT_REFUSED = 9          /* A call of no transfer, such as kvgrpc_step_done, was refused: `failure`. */
} kvgrpc_event_kind;

typedef struct kvgrpc_layer_range {
  uint32_t first;
  uint32_t count;
} kvgrpc_layer_range;

typedef struct kvgrpc_event {
  kvgrpc_event_kind kind;
  kvgrpc_transfer transfer;
  char transfer_id[KVGRPC_ID_BYTES]; /* The lead's name for it, in lists, logs and traces; empty: it has none. */
  uint32_t use_tokens;
  bool cancelled;                    /* Of a failure. */
  kvgrpc_error failure;
  /* These live until the next call of kvgrpc_engine_next, or kvgrpc_engine_close. */
  kvgrpc_bytes grant;
  kvgrpc_bytes transfer_key;
  const kvgrpc_layer_range *layers;
  size_t layer_count;
} kvgrpc_event;

/* Returns the next event; KVGRPC_EVENT_NONE is none. Where none is here yet, it sends queued calls and waits up to
 * `timeout_s`. Call it until there is none: what is queued leaves then. The lead hears which events were read.
 *
 * Errors: UNAVAILABLE (PEER_LOST) when the session is over, on every call: no event follows, and every transfer is lost
 * with it. Close the engine and its ranks, and attach anew. INVALID_ARGUMENT, OUT_OF_RANGE for a lead that sends what it
 * must not: the session is over then, too. */
kvgrpc_code kvgrpc_engine_next(kvgrpc_engine *engine, double timeout_s, kvgrpc_event *event, kvgrpc_error *error);
/* Sends queued calls. */
kvgrpc_code kvgrpc_engine_flush(kvgrpc_engine *engine, kvgrpc_error *error);
/* Ends the session, and with it every lease and transfer of the engine. NULL is allowed. */
void kvgrpc_engine_close(kvgrpc_engine *engine);

/* ---- grants in JSON */

/* Writes the grant as kv_transfer_params, the object that routers relay, with a final NUL. `is_read`: of a hand-over,
 * not of a reservation. Returns the length of the whole text, which was cut if it is not less than `capacity`. */
size_t kvgrpc_grant_to_json(kvgrpc_bytes grant, bool is_read, char *into, size_t capacity);
/* Reads the text of the member kvgrpc_grant of kv_transfer_params. Returns the number of bytes of the grant; 0 if that
 * is no base64, or if there are more than `capacity`. */
size_t kvgrpc_grant_from_text(const char *text, size_t length, uint8_t *into, size_t capacity);

#ifdef __cplusplus
}
#endif

#endif
