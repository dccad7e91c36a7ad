"""Failovers of real database clusters, under load: Patroni with etcd, and Galera."""
