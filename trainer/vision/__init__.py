"""Vision preprocessing for Qwen-VL models, shared by the template, the engines and the trainer."""
