// SPDX-License-Identifier: GPL-2.0
/* Stand-in for GDRCopy's gdrdrv.ko: a third party's module that keeps nvidia in use and is in no list of NVIDIA's. */
#include "standin.h"

static dev_t node;
static struct cdev gdr_cdev;
static const struct file_operations gdr_fops = { .owner = THIS_MODULE };
/* The real module pins GPU pages through these two; here taking their addresses is what makes the dependency. */
static int (*pin[])(void) __used = { nvidia_p2p_get_pages, nvidia_p2p_put_pages };

static int __init gdr_init(void)
{
	int error = alloc_chrdev_region(&node, 0, 1, "gdrdrv");

	if (error)
		return error;
	error = standin_cdev_add(&gdr_cdev, &gdr_fops, node, 1);
	if (error)
		unregister_chrdev_region(node, 1);
	return error;
}

static void __exit gdr_exit(void)
{
	cdev_del(&gdr_cdev);
	unregister_chrdev_region(node, 1);
}

module_init(gdr_init);
module_exit(gdr_exit);
MODULE_LICENSE("GPL");
MODULE_VERSION("2.4.1");
MODULE_DESCRIPTION("stand-in for GDRCopy's gdrdrv.ko");
