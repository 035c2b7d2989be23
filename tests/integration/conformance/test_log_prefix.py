"""The prefix that adds the actor's name to records of Python's logging."""


def test_records_name_their_actor(program):
    done = program(
        """
        import logging, sys
        import monarch.actor
        from monarch.actor import Actor, context, endpoint, this_host

        def install():
            handler = logging.StreamHandler(sys.stdout)
            handler.setFormatter(logging.Formatter("%(name)s %(message)s"))
            logging.getLogger().addHandler(handler)

        class Talks(Actor):
            def __init__(self):
                install()
            @endpoint
            def talk(self):
                self.logger.warning("value %d", 5)
                logging.getLogger("other").warning("plain")
                logging.getLogger("empty").warning("")
            @endpoint
            def talk_without(self):
                monarch.actor.config.prefix_python_logs_with_actor = False
                self.logger.warning("unprefixed")

        install()
        logging.getLogger("early").warning("no context yet")
        context()
        logging.getLogger("client").warning("on the client")
        procs = this_host().spawn_procs({"gpus": 1})
        talks = procs.spawn("talks", Talks)
        talks.talk.call().get()
        talks.talk_without.call().get()
        procs.stop().get()
        logging.getLogger("client").warning("still %s", "here")
        monarch.actor.config.prefix_python_logs_with_actor = False
        logging.getLogger("client").warning("no prefix")
        """
    )
    me = "[actor=<root>.<__main__.Talks talks{'gpus': 0/1}>]"
    assert done.stdout.splitlines() == [
        "early no context yet",
        "client [actor=<root>] on the client",
        f"Talks {me} value 5",
        f"other {me} plain",
        "empty ",
        "Talks unprefixed",
        "client [actor=<root>] still here",
        "client no prefix",
    ]


def test_records_carry_the_prefix(program):
    done = program(
        """
        import logging
        from monarch.actor import context

        context()

        class Keeps(logging.Handler):
            def emit(self, record):
                print(repr(record.actor_prefix), record.getMessage())

        logging.getLogger().addHandler(Keeps())
        logging.getLogger("x").warning("%s", "one")
        """
    )
    assert done.stdout == "'[actor=<root>] ' [actor=<root>] one\n"


def test_warnings_of_procs_reach_stderr(program):
    done = program(
        """
        from monarch.actor import Actor, endpoint, this_host

        class Talks(Actor):
            @endpoint
            def talk(self):
                self.logger.warning("a warning")
                self.logger.error("an error")

        procs = this_host().spawn_procs()
        procs.spawn("talks", Talks).talk.call_one().get()
        procs.stop().get()
        """
    )
    assert "a warning" in done.stderr
    assert "an error" in done.stderr
