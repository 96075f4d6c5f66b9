"""What devices and links are like and how fast they are: estimated, measured on this machine, or from data sheets."""
