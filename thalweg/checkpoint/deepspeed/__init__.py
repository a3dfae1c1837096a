"""Checkpoints that DeepSpeed wrote: recognised, read without its classes, loaded into any layout.

``torch_file`` reads a file and runs nothing of it; ``flat_tensors`` cuts the flat vectors of ZeRO into boxes;
``checkpoint_folder`` knows the folders; ``checkpoint`` gives them the face of ours.
"""
