"""What backends share whose engine moves the bytes of a group's collectives: MPI and UCC."""
