"""``zero.Init``: build a model without memory, record how its values come about, materialise it shard by shard."""
