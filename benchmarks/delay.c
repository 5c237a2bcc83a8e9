/* A link with a delay, for kernels without netem: moves packets between two TUN devices, one in each network namespace.

   delay NAMESPACE_A NAMESPACE_B ONE_WAY_MICROSECONDS MEGABITS_PER_SECOND

   Makes a device tun0 in each, prints "ready", and runs until it is killed. A packet leaves when the line has carried it
   (rate, with 38 bytes of Ethernet overhead) and the delay has passed. Trustworthy up to about 1 Gbit/s. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { QUEUE = 4096, LARGEST = 1600, OVERHEAD = 38 };

struct packet { double due; int length; char bytes[LARGEST]; };
struct direction { int from, to; double delay, seconds_per_byte; };

static void fail(const char *what) { perror(what); exit(1); }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static int make_device(const char *name_space) {
    char path[256];
    snprintf(path, sizeof path, "/var/run/netns/%s", name_space);
    int home = open("/proc/self/ns/net", O_RDONLY), there = open(path, O_RDONLY);
    if (home < 0 || there < 0 || setns(there, CLONE_NEWNET)) fail(path);
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    if (device < 0) fail("/dev/net/tun");
    struct ifreq request;
    memset(&request, 0, sizeof request);
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    strcpy(request.ifr_name, "tun0");
    if (ioctl(device, TUNSETIFF, &request)) fail("TUNSETIFF");
    if (setns(home, CLONE_NEWNET)) fail("setns");
    close(home);
    close(there);
    return device;
}

static void *carry(void *argument) {
    struct direction *d = argument;
    struct packet *queue = malloc(QUEUE * sizeof *queue);
    unsigned head = 0, tail = 0;
    double line_free = 0;
    prctl(PR_SET_TIMERSLACK, 1);
    for (;;) {
        double t = now();
        while (head != tail && queue[head % QUEUE].due <= t) {
            struct packet *p = &queue[head++ % QUEUE];
            if (write(d->to, p->bytes, p->length) < 0 && errno != EAGAIN && errno != EIO) fail("write");
        }
        int took = 0;
        while (tail - head < QUEUE) {
            struct packet *p = &queue[tail % QUEUE];
            p->length = read(d->from, p->bytes, LARGEST);
            if (p->length <= 0) break;
            t = now();
            if (line_free < t) line_free = t;
            line_free += (p->length + OVERHEAD) * d->seconds_per_byte;
            p->due = line_free + d->delay;
            tail++;
            if (++took == 64) break;
        }
        if (took) continue;
        struct pollfd wait = {d->from, tail - head < QUEUE ? POLLIN : 0, 0};
        if (head == tail) { poll(&wait, 1, -1); continue; }
        double rest = queue[head % QUEUE].due - now();
        if (rest <= 0) continue;
        struct timespec sleep = {(time_t)rest, (long)((rest - (time_t)rest) * 1e9)};
        ppoll(&wait, 1, &sleep, NULL);
    }
}

int main(int count, char **words) {
    if (count != 5) { fprintf(stderr, "delay NAMESPACE_A NAMESPACE_B ONE_WAY_MICROSECONDS MEGABITS_PER_SECOND\n"); return 2; }
    int a = make_device(words[1]), b = make_device(words[2]);
    double delay = atof(words[3]) * 1e-6, per_byte = 8e-6 / atof(words[4]);
    struct direction there = {a, b, delay, per_byte}, back = {b, a, delay, per_byte};
    printf("ready\n");
    fflush(stdout);
    pthread_t threads[2];
    pthread_create(&threads[0], NULL, carry, &there);
    pthread_create(&threads[1], NULL, carry, &back);
    pthread_join(threads[0], NULL);
    return 0;
}
