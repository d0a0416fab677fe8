"""Weight sync: sends the trainer's weights to SGLang servers by disk, tensors or a process group, and verifies them."""
