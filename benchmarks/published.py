"""What others report of their systems, with the source, and what differs from ours."""

PUBLISHED: tuple[dict[str, str], ...] = (
    {
        "system": "GACT (Liu et al., ICML 2022)",
        "figure": "activations up to 8.1 times smaller, batches 4.2 to 24.7 times larger",
        "source": "abstract; github.com/LiuXiaoxuanPKU/GACT-ICML, README",
        "differs": "PyTorch on a GPU; the largest factor is with checkpointing",
    },
    {
        "system": "GACT, level 2.2 (2 bits on average)",
        "figure": "ResNet-50, batch 64: activations 5209 to 651 MB, peak 5641 to 3446 MB (1.6)",
        "source": "github.com/LiuXiaoxuanPKU/GACT-ICML/issues/2",
        "differs": "a user's run of its own script",
    },
    {
        "system": "GACT, level 1 (4 bits)",
        "figure": "accuracy less than 0.5 points below",
        "source": "github.com/LiuXiaoxuanPKU/GACT-ICML/issues/4, which quotes the paper",
        "differs": "large data sets, full schedules",
    },
    {
        "system": "GACT, level 1.2 (2 bits), in 16 GB",
        "figure": "ResNet-152, batch 64: 58 to 426 blocks, width 88 to 316, side 232 to 576; "
        "BERT large, batch 16: 32 to 60 layers, width 1280 to 1936",
        "source": "github.com/LiuXiaoxuanPKU/GACT-ICML, benchmark, files max_*_results.json",
        "differs": "found by running out of memory on a GPU; our `scale` asks the compiler",
    },
    {
        "system": "GACT, level 1 (4 bits), in 16 GB",
        "figure": "ResNet-152, batch 64: 58 to 266 blocks, width 88 to 284, side 232 to 492; "
        "BERT large, batch 16: 32 to 56 layers, width 1280 to 1920",
        "source": "the same",
        "differs": "the same",
    },
    {
        "system": "ActNN, level 3 (Chen et al., ICML 2021)",
        "figure": "activations 12 times smaller, batches 6.6 to 14 times larger, 2 bits",
        "source": "abstract; github.com/ucbrise/actnn, README",
        "differs": "PyTorch layers of its own, on a T4",
    },
    {
        "system": "ActNN, 2 bits",
        "figure": "ResNet-50, batch 256: activations 20.48 to 1.94 GB, total 20.92 to 2.39 GB",
        "source": "github.com/guanchuwang/division, figure/memory_cost_table.png",
        "differs": "run by DIVISION's authors",
    },
    {
        "system": "DIVISION (Wang et al., ICML 2023)",
        "figure": "ResNet-50, batch 256: activations 20.48 to 1.97 GB; ImageNet 76.15 to 75.86",
        "source": "github.com/guanchuwang/division, the same figure and plot/acc_bar_plot.py",
        "differs": "block averages and 2 bits, for convolutional networks; our `hybrid2`",
    },
    {
        "system": "checkpointing, in the same table",
        "figure": "ResNet-50, batch 256: activations 20.48 to 8.95 GB (2.3), total 9.39 GB",
        "source": "github.com/guanchuwang/division, figure/memory_cost_table.png",
        "differs": "PyTorch",
    },
    {
        "system": "Barley & Froening (arXiv 2409.11902)",
        "figure": "peak 29 % lower, with a longer schedule for the same accuracy",
        "source": "abstract",
        "differs": "pools the inputs of convolutions alone; our `barley-2x2`",
    },
    {
        "system": "Chakrabarti & Moseley (NeurIPS 2019), 4 bits",
        "figure": "ResNet-50, batch 256: activations 20.48 to 3.28 GB; CIFAR-10 94.90 to 94.51",
        "source": "github.com/guanchuwang/division, the same figure and plot/acc_bar_plot.py",
        "differs": "run by DIVISION's authors; networks of BatchNorm and ReLU alone; our `blpa-4`",
    },
)
