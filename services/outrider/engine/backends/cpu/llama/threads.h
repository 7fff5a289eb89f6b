// The threads of a step.
//
// A step hands out its work in pieces: whoever is free takes the next one. Nobody is waited for but those at work on a
// piece, so a thread whose core is taken by another process costs what it would have done, not the step. (With OpenMP
// every loop waits for every thread: beside a draft at work on the same core, a second one gained nothing.)

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

typedef void Work(const void *context, int64_t piece, int thread);

typedef struct {
    Work *_Atomic work;
    const void *_Atomic context;
    _Atomic int64_t pieces;
    _Atomic int threads;  // those with a lower number may take part
} Job;

static struct {
    pthread_mutex_t busy, lock;  // busy: held for a step
    pthread_cond_t begun;
    int started;          // threads besides the callers'
    _Atomic int helpers;  // that take part in the step under way; 0 between steps
    // Of this job and the one before: whoever still looks at that one finds its number in `next` gone.
    Job job[2];
    _Atomic uint64_t next;  // the job's number in the upper half, the next piece of it in the lower
    _Atomic int64_t done;   // pieces of the job
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .begun = PTHREAD_COND_INITIALIZER};

// Takes a piece and does it; 0 when there was none.
static int help(int thread) {
    uint64_t next = atomic_load_explicit(&pool.next, memory_order_acquire);
    Job *job = &pool.job[next >> 32 & 1];
    Work *const work = atomic_load_explicit(&job->work, memory_order_relaxed);
    const void *const context = atomic_load_explicit(&job->context, memory_order_relaxed);
    const int64_t piece = (uint32_t)next;
    if (thread >= atomic_load_explicit(&job->threads, memory_order_relaxed)) return 0;
    if (piece >= atomic_load_explicit(&job->pieces, memory_order_relaxed)) return 0;
    if (!atomic_compare_exchange_strong(&pool.next, &next, next + 1)) return 1;
    work(context, piece, thread);
    atomic_fetch_add_explicit(&pool.done, 1, memory_order_release);
    return 1;
}

// Between two looks. Now and then the core is offered to others: there may be more threads than cores.
static void rest(int idle) {
    if (idle % 256) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    } else {
        sched_yield();
    }
}

static void *helper(void *argument) {
    const int thread = (int)(intptr_t)argument;
    for (;;) {
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.helpers) < thread) pthread_cond_wait(&pool.begun, &pool.lock);
        pthread_mutex_unlock(&pool.lock);
        for (int idle = 0; atomic_load_explicit(&pool.helpers, memory_order_relaxed) >= thread;) {
            if (help(thread)) {
                idle = 0;
            } else {
                rest(++idle);
            }
        }
    }
    return 0;
}

// With the lock held: brings the helpers up to `wanted`, on the cores that the calling thread may use.
static void start(int64_t wanted) {
    while (pool.started < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, 0, helper, (void *)(intptr_t)(pool.started + 1))) return;
        pthread_detach(thread);
        pool.started++;
    }
}

// Before the first step, by who wants them elsewhere than the steps' own thread.
void outrider_start_helpers(int64_t wanted) {
    pthread_mutex_lock(&pool.lock);
    start(wanted);
    pthread_mutex_unlock(&pool.lock);
}

// Returns how many threads the step may use: one while another step has the helpers.
static int begin(int64_t threads) {
    if (threads <= 1 || pthread_mutex_trylock(&pool.busy)) return 1;
    pthread_mutex_lock(&pool.lock);
    start(threads - 1);
    // None could be started: then `share` does all itself, as it does where they come too late.
    if (threads > pool.started + 1) threads = pool.started + 1;
    atomic_store(&pool.helpers, (int)threads - 1);
    pthread_cond_broadcast(&pool.begun);
    pthread_mutex_unlock(&pool.lock);
    if (threads == 1) pthread_mutex_unlock(&pool.busy);
    return (int)threads;
}

static void end(int threads) {
    if (threads <= 1) return;
    atomic_store(&pool.helpers, 0);
    pthread_mutex_unlock(&pool.busy);
}

// Does all pieces, and returns when all are done.
static void share(Work *work, const void *context, int64_t pieces, int threads) {
    if (threads <= 1 || pieces <= 1) {
        for (int64_t piece = 0; piece < pieces; piece++) work(context, piece, 0);
        return;
    }
    const uint64_t number = (atomic_load(&pool.next) >> 32) + 1;
    Job *job = &pool.job[number & 1];
    atomic_store_explicit(&job->work, work, memory_order_relaxed);
    atomic_store_explicit(&job->context, context, memory_order_relaxed);
    atomic_store_explicit(&job->pieces, pieces, memory_order_relaxed);
    atomic_store_explicit(&job->threads, threads, memory_order_relaxed);
    atomic_store_explicit(&pool.done, 0, memory_order_relaxed);
    atomic_store_explicit(&pool.next, number << 32, memory_order_release);
    while (help(0)) continue;
    for (int idle = 0; atomic_load_explicit(&pool.done, memory_order_acquire) < pieces;) rest(++idle);
}
