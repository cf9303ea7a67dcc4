"""An emulated cluster on one machine: network namespaces, shaped links, killable hosts."""
