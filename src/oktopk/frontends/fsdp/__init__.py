"""The front end for FSDP2: dense inside a replica, sparse between replicas (HSDP)."""
