/* SPDX-License-Identifier: GPL-3.0-or-later */
/*
 * The whole initial RAM disk: load the modules listed in /mods, mount the disk, become its /sbin/init.
 * A tenth of the size of a distribution's, and it holds no NVIDIA module, so a reboot loads what is installed on the disk.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define DISK "/dev/vda"
#define TRIES 3000 /* times 10 ms */

static void load(const char *name)
{
	int fd = open(name, O_RDONLY | O_CLOEXEC);

	if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) && errno != EEXIST))
		fprintf(stderr, "init: %s: %s\n", name, strerror(errno));
	if (fd >= 0)
		close(fd);
}

int main(int count, char **arguments)
{
	char line[256];
	int tries;
	FILE *list;

	(void)count;
	mkdir("/dev", 0755);
	mount("devtmpfs", "/dev", "devtmpfs", 0, "mode=0755");
	list = fopen("/mods", "re");
	while (list && fgets(line, sizeof(line), list)) {
		line[strcspn(line, "\n")] = 0;
		load(line);
	}
	mkdir("/new", 0755);
	for (tries = 0; tries < TRIES && mount(DISK, "/new", "ext4", MS_NOATIME, ""); tries++)
		usleep(10000);
	if (tries == TRIES) {
		perror("init: mount " DISK);
		return 1;
	}
	mount("/dev", "/new/dev", NULL, MS_MOVE, NULL);
	if (chdir("/new") || mount(".", "/", NULL, MS_MOVE, NULL) || chroot(".") || chdir("/")) {
		perror("init: switch root");
		return 1;
	}
	arguments[0] = "/sbin/init";
	execv("/sbin/init", arguments);
	perror("init: /sbin/init");
	return 1;
}
