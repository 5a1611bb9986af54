/* A tool for NVTX, as small as it can be: writes each event of a domain to NVTX_RECORD_FILE, one JSON object a line.
 *
 * NVTX loads the library that NVTX_INJECTION64_PATH names, at its first call, and asks it to fill in a table of
 * functions. Times are CLOCK_MONOTONIC, the clock of Python's perf_counter_ns. Names are written as they are: ours
 * hold no quotes.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <nvtx3/nvToolsExt.h>

static FILE *out;
static uint64_t next_id = 1;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void write_event(const char *event, nvtxDomainHandle_t domain, const nvtxEventAttributes_t *a, uint64_t id,
                        int64_t time_ns) {
    const char *name = a->messageType == NVTX_MESSAGE_TYPE_REGISTERED ? (const char *)a->message.registered
                                                                      : a->message.ascii;
    int64_t payload = a->payloadType == NVTX_PAYLOAD_TYPE_INT64 ? a->payload.llValue : -1;
    fprintf(out,
            "{\"event\":\"%s\",\"domain\":\"%s\",\"name\":\"%s\",\"category\":%u,\"colour\":%u,\"payload\":%" PRId64
            ",\"id\":%" PRIu64 ",\"thread\":%d,\"time_ns\":%" PRId64 "}\n",
            event, (const char *)domain, name, a->category, a->color, payload, id, (int)gettid(), time_ns);
}

static void write_end(const char *event, nvtxDomainHandle_t domain, uint64_t id, int64_t time_ns) {
    fprintf(out, "{\"event\":\"%s\",\"domain\":\"%s\",\"id\":%" PRIu64 ",\"thread\":%d,\"time_ns\":%" PRId64 "}\n",
            event, (const char *)domain, id, (int)gettid(), time_ns);
}

/* Handles of domains and strings are copies of their names. */
static nvtxDomainHandle_t create_domain(const char *name) { return (nvtxDomainHandle_t)strdup(name); }

static nvtxStringHandle_t register_string(nvtxDomainHandle_t domain, const char *text) {
    (void)domain;
    return (nvtxStringHandle_t)strdup(text);
}

static void name_category(nvtxDomainHandle_t domain, uint32_t number, const char *name) {
    fprintf(out, "{\"event\":\"category\",\"domain\":\"%s\",\"category\":%u,\"name\":\"%s\"}\n", (const char *)domain,
            number, name);
}

static int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *a) {
    write_event("push", domain, a, 0, now_ns());
    return 0;
}

static int pop(nvtxDomainHandle_t domain) {
    write_end("pop", domain, 0, now_ns());
    return 0;
}

static nvtxRangeId_t start(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *a) {
    uint64_t id = __atomic_fetch_add(&next_id, 1, __ATOMIC_RELAXED);
    write_event("start", domain, a, id, now_ns());
    return id;
}

static void end(nvtxDomainHandle_t domain, nvtxRangeId_t id) { write_end("end", domain, id, now_ns()); }

static void mark(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *a) { write_event("mark", domain, a, 0, now_ns()); }

__attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
    const NvtxExportTableCallbacks *callbacks = get_table(NVTX_ETID_CALLBACKS);
    const char *path = getenv("NVTX_RECORD_FILE");
    NvtxFunctionTable table;
    unsigned size;
    if (!callbacks || !path || !(out = fopen(path, "w"))) return 0;
    if (!callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
    *table[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)create_domain;
    *table[NVTX_CBID_CORE2_DomainRegisterStringA] = (NvtxFunctionPointer)register_string;
    *table[NVTX_CBID_CORE2_DomainNameCategoryA] = (NvtxFunctionPointer)name_category;
    *table[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)push;
    *table[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)pop;
    *table[NVTX_CBID_CORE2_DomainRangeStartEx] = (NvtxFunctionPointer)start;
    *table[NVTX_CBID_CORE2_DomainRangeEnd] = (NvtxFunctionPointer)end;
    *table[NVTX_CBID_CORE2_DomainMarkEx] = (NvtxFunctionPointer)mark;
    return 1;
}
