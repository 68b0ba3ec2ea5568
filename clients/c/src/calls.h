/* What calls have in common: fields of their requests, and what is checked before. */
#ifndef KV_CALLS_H
#define KV_CALLS_H

#include "engine.h"

#define ON_ABORT_RELEASE 1
#define ON_ABORT_KEEP 2

kvgrpc_code kv_invalid(kvgrpc_error *error, const char *what);
const kvgrpc_labels *kv_labels_or_none(const kvgrpc_labels *labels);
void kv_put_blocks(kv_writer *to, uint32_t field, uint64_t incarnation, const kvgrpc_blocks *blocks, size_t rows);
void kv_put_content(kv_writer *to, const kvgrpc_content *content);
kvgrpc_code kv_check_content(const kvgrpc_content *content, kvgrpc_error *error);
kvgrpc_code kv_check_blocks(const kvgrpc_blocks *blocks, size_t rows, kvgrpc_error *error);
kvgrpc_code kv_check_seconds(double seconds, kvgrpc_error *error);
kvgrpc_code kv_find(const kvgrpc_engine *engine, kvgrpc_transfer handle, kv_kind kind, kv_transfer **found,
                    kvgrpc_error *error);

#endif
