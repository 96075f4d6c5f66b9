"""What goes token by token: gated delta nets, scans, short convolutions and windows."""
