"""Faults in how chats are written and where turns of the model end."""

from tests.mutants.faults import Fault

CHATS = "tests/field/test_templates.py::"

TEMPLATES = (
    Fault(
        "templates: tools do not choose one",
        "return self.default if tools is None else self.tool_use",
        "return self.default",
        (CHATS + "test_the_template_is_chosen_as_transformers_chooses_it",),
    ),
    Fault(
        "templates: arguments are objects for each",
        "told = [best] if best == as_json(messages) else [best, as_json(messages)]",
        "told = [best]",
        (CHATS + "test_arguments_are_written_once",),
    ),
    Fault(
        "templates: contents stay as they are given",
        "product(told, (None, as_text, as_parts))",
        "product(told, (None,))",
        (CHATS + "test_contents_are_given_as_the_template_takes_them",),
    ),
    Fault(
        "templates: an answer of null is trained as an empty one",
        "if CONTENT not in message and not says:",
        "if CONTENT not in message and message.get('role') == 'nobody':",
        (CHATS + "test_what_is_not_said_in_text_is_named",),
    ),
    Fault(
        "templates: a message that is left out goes unseen",
        "            if left:\n                calls",
        "            if left and not shown:\n                calls",
        (CHATS + "test_a_message_that_the_template_leaves_out_is_named",),
    ),
    Fault(
        "chats: other names of the assistant are read",
        "if str(role).strip().lower() in _ANSWERERS:",
        "if str(role) in ():",
        (CHATS + "test_the_assistant_by_another_name_is_named",),
    ),
    Fault(
        "templates: the day is that of the reading",
        "names[_CLOCK] = partial(_written, day)",
        "names[_CLOCK] = before[0]",
        (CHATS + "test_the_library_s_own_clock_is_left_as_it_was",),
    ),
    Fault(
        "chats: the sign of an end ends an answer that holds it",
        "content_end = max(begin, len(text) - len(behind)) if known else begin",
        "content_end = begin",
        (CHATS + "test_turns_are_those_of_trl_s_training_templates",),
    ),
    Fault(
        "chats: the token that begins the next turn is not trained",
        'return end if follows[0]["role"] == ASSISTANT else end + len(self._sign_at(text, end))',
        "return end",
        (CHATS + "test_the_next_role_s_marker_ends_a_turn",),
    ),
    Fault(
        "tokenizers: a beginning that is there is added",
        "row[:2] == [begin, begin] and self._begins() == begin",
        "row[:3] == [begin, begin, begin] and self._begins() == begin",
        (CHATS + "test_a_beginning_that_is_there_is_not_added",),
    ),
    Fault(
        "origin: a run has the day of its resumption",
        "    if not known:\n        day = ",
        "    if True:\n        day = ",
        (CHATS + "test_a_run_keeps_the_day_of_its_start",),
    ),
)
