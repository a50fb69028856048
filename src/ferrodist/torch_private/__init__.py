"""torch's private names: each is read in one of these modules, and nowhere else.

A private name may go with any release of torch. So each module is about one subject, says which versions of torch have
its names, and gives what its callers need: by another way where a name is missing, or by an error that says which
feature that version of torch lacks.
"""
