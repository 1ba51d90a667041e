"""The recorder: the only part of the auditor that imports torch. It watches and changes nothing."""
