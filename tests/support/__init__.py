"""Tools of the tests: clients, disks, clocks and certificates that several test modules share."""
