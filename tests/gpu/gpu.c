/* A small program of CUDA's driver API, which needs no CUDA toolkit to build or run: the driver brings libcuda.
     gpu hold MIB [beside]        takes so much of the first GPU that it sees, says so, and ends with its input; beside MPS
     gpu limit CGROUP UUID MIB    has the driver hold a cgroup to a limit (driver 615 and later), and reads it back
     gpu suspend PID              moves a process's GPU memory to the host, says so, and moves it back at end of input
   Exit codes: 2 where there is too little memory, 3 where the driver has no limits, 1 for any other error. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef unsigned long long u64;

static void *library(const char *name) {
    void *found = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
    if (!found) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    return found;
}

static void *function(void *from, const char *name) {
    void *found = dlsym(from, name);
    if (!found) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    return found;
}

enum { OUT_OF_MEMORY = 2, MULTIPROCESSOR_COUNT = 16 };

static void *cuda;

static void check(const char *call, int result) {
    int (*name)(int, const char **) = function(cuda, "cuGetErrorName");
    const char *text = "unknown";

    if (result == 0)
        return;
    name(result, &text);
    fprintf(stderr, "%s: %s\n", call, text);
    exit(result == OUT_OF_MEMORY ? 2 : 1);
}

static int hold(u64 mib) {
    void *context;
    u64 memory;
    size_t free, total;
    int device, processors;

    cuda = library("libcuda.so.1");
    int (*init)(unsigned) = function(cuda, "cuInit");
    int (*get)(int *, int) = function(cuda, "cuDeviceGet");
    int (*create)(void **, unsigned, int) = function(cuda, "cuCtxCreate_v2");
    int (*info)(size_t *, size_t *) = function(cuda, "cuMemGetInfo_v2");
    int (*attribute)(int *, int, int) = function(cuda, "cuDeviceGetAttribute");
    int (*allocate)(u64 *, size_t) = function(cuda, "cuMemAlloc_v2");
    int (*fill)(u64, unsigned char, size_t) = function(cuda, "cuMemsetD8_v2");
    int (*wait)(void) = function(cuda, "cuCtxSynchronize");
    check("cuInit", init(0));
    check("cuDeviceGet", get(&device, 0));
    check("cuCtxCreate", create(&context, 0, device));
    check("cuMemGetInfo", info(&free, &total));
    check("cuDeviceGetAttribute", attribute(&processors, MULTIPROCESSOR_COUNT, device));
    check("cuMemAlloc", allocate(&memory, mib << 20));
    check("cuMemsetD8", fill(memory, 1, mib << 20));
    check("cuCtxSynchronize", wait());
    printf("holds %llu MiB of %zu MiB, %zu MiB were free, %d multiprocessors\n", mib, total >> 20, free >> 20, processors);
    fflush(stdout);
    while (getchar() != EOF)
        ;
    return 0;
}

/* Of nvml.h of driver 615. */
struct limits {
    const char *cgroup;
    u64 soft, hard;
};
struct limits_read {
    const char *cgroup;
    u64 soft, hard, used;
};

static int limit(const char *cgroup, const char *uuid, u64 mib) {
    void *nvml = library("libnvidia-ml.so.1");
    void *device;
    struct limits limits = {cgroup, 0, mib << 20};
    struct limits_read read = {cgroup, 0, 0, 0};
    int (*init)(void) = function(nvml, "nvmlInit_v2");
    int (*get)(const char *, void **) = function(nvml, "nvmlDeviceGetHandleByUUID");
    const char *(*text)(int) = function(nvml, "nvmlErrorString");
    int (*set)(void *, void *) = dlsym(nvml, "nvmlDeviceSetMemoryLimits_v1");
    int (*back)(void *, void *) = dlsym(nvml, "nvmlDeviceGetMemoryLimits_v1");
    int result = init();

    if (!set || !back) {
        fprintf(stderr, "the driver has no nvmlDeviceSetMemoryLimits_v1\n");
        return 3;
    }
    if (!result)
        result = get(uuid, &device);
    if (!result)
        result = set(device, &limits);
    if (!result)
        result = back(device, &read);
    if (result) {
        fprintf(stderr, "NVML: %s\n", text(result));
        return 1;
    }
    printf("limit %llu MiB, in use %llu MiB\n", read.hard >> 20, read.used >> 20);
    return 0;
}

static double seconds(void) {
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

/* From driver 570 on, https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__CHECKPOINT.html */
static int suspend(int pid) {
    double begun;

    cuda = library("libcuda.so.1");
    int (*init)(unsigned) = function(cuda, "cuInit");
    int (*lock)(int, void *) = dlsym(cuda, "cuCheckpointProcessLock");
    int (*checkpoint)(int, void *) = dlsym(cuda, "cuCheckpointProcessCheckpoint");
    int (*restore)(int, void *) = dlsym(cuda, "cuCheckpointProcessRestore");
    int (*unlock)(int, void *) = dlsym(cuda, "cuCheckpointProcessUnlock");

    if (!lock || !checkpoint || !restore || !unlock) {
        fprintf(stderr, "the driver cannot suspend a process\n");
        return 3;
    }
    check("cuInit", init(0));
    begun = seconds();
    check("cuCheckpointProcessLock", lock(pid, NULL));
    check("cuCheckpointProcessCheckpoint", checkpoint(pid, NULL));
    printf("%.2f s\n", seconds() - begun);
    fflush(stdout);
    while (getchar() != EOF)
        ;
    begun = seconds();
    check("cuCheckpointProcessRestore", restore(pid, NULL));
    check("cuCheckpointProcessUnlock", unlock(pid, NULL));
    printf("%.2f s\n", seconds() - begun);
    return 0;
}

int main(int count, char **arguments) {
    if (count == 4 && !strcmp(arguments[3], "beside"))
        setenv("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent", 1);
    if (count >= 3 && !strcmp(arguments[1], "hold"))
        return hold(strtoull(arguments[2], NULL, 10));
    if (count == 5 && !strcmp(arguments[1], "limit"))
        return limit(arguments[2], arguments[3], strtoull(arguments[4], NULL, 10));
    if (count == 3 && !strcmp(arguments[1], "suspend"))
        return suspend(atoi(arguments[2]));
    fprintf(stderr, "usage: gpu hold MIB [beside] | gpu limit CGROUP UUID MIB | gpu suspend PID\n");
    return 1;
}
