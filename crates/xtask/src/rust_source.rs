//! Rust text split into what is code and what is comment, line by line.
//!
//! The tidy checks look for words. A word inside a string or a comment means
//! something else than the same word in code, so a small lexer separates them.
//! It knows comments (nested), string, raw string and character literals, and
//! tells lifetimes from characters; it knows nothing else about Rust.

/// How attributes begin that keep an item for tests only.
pub(crate) const TEST_ATTRIBUTES: [&str; 2] = ["#[cfg(test)]", "#[cfg(all(test,"];
/// What stands over a module of loom models inside of a crate.
pub(crate) const LOOM_ATTRIBUTES: [&str; 2] =
    ["#[cfg(all(test, loom))]", "#[cfg(all(loom, test))]"];

/// One line of a source file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Line {
    /// Code, with comments removed and the inside of literals dropped.
    pub(crate) code: String,
    /// Text of the comments on this line.
    pub(crate) comment: String,
    /// The line is inside an item under `#[cfg(test)]`.
    pub(crate) in_test: bool,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Code,
    LineComment,
    /// Depth of nested `/* */`.
    BlockComment(usize),
    Str,
    /// Raw string that ends at a quote with this many hashes.
    RawStr(usize),
}

/// Splits `source` into lines of code and comment.
pub(crate) fn split(source: &str) -> Vec<Line> {
    let chars: Vec<char> = source.chars().collect();
    let mut lines = vec![Line::default()];
    let mut state = State::Code;
    let mut at = 0;
    while at < chars.len() {
        let current = chars[at];
        if current == '\n' {
            if matches!(state, State::LineComment) {
                state = State::Code;
            }
            lines.push(Line::default());
            at += 1;
            continue;
        }
        let line = lines
            .last_mut()
            .expect("starts with one line and only grows");
        let used;
        (state, used) = match state {
            State::Code => step_code(&chars, at, line),
            State::LineComment => {
                line.comment.push(current);
                (state, 1)
            }
            State::BlockComment(depth) => step_block_comment(&chars, at, depth, line),
            State::Str => step_string(&chars, at, line),
            State::RawStr(hashes) => {
                if current == '"' && hash_count(&chars, at + 1) >= hashes {
                    line.code.push('"');
                    (State::Code, 1 + hashes)
                } else {
                    (state, 1)
                }
            }
        };
        at += used;
    }
    if lines.last().is_some_and(|line| *line == Line::default()) {
        lines.pop();
    }
    mark_tests(&mut lines);
    lines
}

/// One step in code: the next state and how many characters it used.
fn step_code(chars: &[char], at: usize, line: &mut Line) -> (State, usize) {
    let next = chars.get(at + 1).copied();
    match chars[at] {
        '/' if next == Some('/') => (State::LineComment, 2),
        '/' if next == Some('*') => (State::BlockComment(1), 2),
        '"' => {
            line.code.push('"');
            // `r"`, `br#"` and so on: the prefix is already in `code`.
            let hashes = line
                .code
                .chars()
                .rev()
                .skip(1)
                .take_while(|&c| c == '#')
                .count();
            let before = &line.code[..line.code.len() - 1 - hashes];
            if is_raw_prefix(before) {
                (State::RawStr(hashes), 1)
            } else {
                (State::Str, 1)
            }
        }
        '\'' => {
            line.code.push('\'');
            (State::Code, char_literal_length(chars, at))
        }
        other => {
            line.code.push(other);
            (State::Code, 1)
        }
    }
}

/// Whether `code` ends in the prefix of a raw string (`r`, `br` or `cr`).
fn is_raw_prefix(code: &str) -> bool {
    let word_start = code
        .char_indices()
        .rev()
        .take_while(|&(_, c)| c.is_alphanumeric() || c == '_')
        .last()
        .map_or(code.len(), |(start, _)| start);
    matches!(&code[word_start..], "r" | "br" | "cr")
}

fn step_block_comment(chars: &[char], at: usize, depth: usize, line: &mut Line) -> (State, usize) {
    match (chars[at], chars.get(at + 1)) {
        ('*', Some('/')) if depth == 1 => (State::Code, 2),
        ('*', Some('/')) => (State::BlockComment(depth - 1), 2),
        ('/', Some('*')) => (State::BlockComment(depth + 1), 2),
        (other, _) => {
            line.comment.push(other);
            (State::BlockComment(depth), 1)
        }
    }
}

fn step_string(chars: &[char], at: usize, line: &mut Line) -> (State, usize) {
    match chars[at] {
        // An escaped line break ends the line as any other does.
        '\\' if chars.get(at + 1) == Some(&'\n') => (State::Str, 1),
        '\\' => (State::Str, 2),
        '"' => {
            line.code.push('"');
            (State::Code, 1)
        }
        _ => (State::Str, 1),
    }
}

/// Characters of the literal that starts at the quote `at`; 1 for a lifetime.
fn char_literal_length(chars: &[char], at: usize) -> usize {
    if chars.get(at + 1) == Some(&'\\') {
        let end = chars
            .iter()
            .skip(at + 3)
            .position(|&c| c == '\'' || c == '\n');
        return end.map_or(1, |distance| distance + 4);
    }
    if chars.get(at + 2) == Some(&'\'') && chars.get(at + 1) != Some(&'\n') {
        3
    } else {
        1
    }
}

fn hash_count(chars: &[char], from: usize) -> usize {
    chars.iter().skip(from).take_while(|&&c| c == '#').count()
}

/// Marks the items that follow a `#[cfg(test)]`: up to the `;` or the closing
/// brace that ends the item.
fn mark_tests(lines: &mut [Line]) {
    let mut waiting = false;
    let mut depth = 0_usize;
    for line in lines {
        let mut rest = line.code.as_str();
        if !waiting && let Some(start) = test_attribute(rest) {
            waiting = true;
            depth = 0;
            rest = &rest[start..];
        }
        line.in_test = waiting;
        if !waiting {
            continue;
        }
        for c in rest.chars() {
            match c {
                '{' | '[' | '(' => depth += 1,
                '}' | ']' | ')' => depth = depth.saturating_sub(1),
                ';' if depth == 0 => waiting = false,
                _ => {}
            }
            if c == '}' && depth == 0 {
                waiting = false;
            }
        }
    }
}

/// Where an attribute starts that keeps an item for tests only.
fn test_attribute(code: &str) -> Option<usize> {
    TEST_ATTRIBUTES
        .iter()
        .find_map(|attribute| code.find(attribute))
}

/// Names of the modules that stand under an attribute whose text begins like
/// one of `attributes`.
pub(crate) fn modules_under(lines: &[Line], attributes: &[&str]) -> Vec<String> {
    let mut modules = Vec::new();
    let mut waiting = false;
    for line in lines {
        let mut code = line.code.trim();
        while code.starts_with('#') {
            waiting |= attributes
                .iter()
                .any(|attribute| code.starts_with(attribute));
            let Some(end) = code.find(']') else { break };
            code = code[end + 1..].trim_start();
        }
        if code.is_empty() || !std::mem::take(&mut waiting) {
            continue;
        }
        let mut words = code.split(|c: char| c.is_whitespace() || c == ';' || c == '{');
        if words.any(|word| word == "mod") {
            modules.extend(words.next().map(str::to_owned));
        }
    }
    modules
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(source: &str) -> Vec<String> {
        split(source).into_iter().map(|line| line.code).collect()
    }

    #[test]
    fn comments_are_not_code() {
        let lines = split("a(); // one\n/* two\n/* three */ four */ b();\n");
        assert_eq!(lines.len(), 3);
        assert_eq!(
            (lines[0].code.as_str(), lines[0].comment.as_str()),
            ("a(); ", " one")
        );
        assert_eq!(
            (lines[1].code.as_str(), lines[1].comment.as_str()),
            ("", " two")
        );
        assert_eq!(
            (lines[2].code.as_str(), lines[2].comment.as_str()),
            (" b();", " three  four ")
        );
    }

    #[test]
    fn inside_of_literals_is_dropped() {
        assert_eq!(code(r#"f("a \" // b", 'c');"#), [r#"f("", ');"#]);
        assert_eq!(
            code("f(r#\"a \" // b\"#, br\"c\\\");"),
            ["f(r#\"\", br\"\");"]
        );
        assert_eq!(code("x(\"one\\\ntwo\"); y"), ["x(\"", "\"); y"]);
        assert_eq!(code("for\"a\\\"b\""), ["for\"\""]);
    }

    #[test]
    fn lifetimes_are_not_characters() {
        assert_eq!(
            code("fn f<'a>(x: &'a str) { g('\"', '\\'', '\\u{7f}'); }"),
            ["fn f<'a>(x: &'a str) { g(', ', '); }"]
        );
    }

    #[test]
    fn test_items_are_marked_to_their_end() {
        let source =
            "a\n#[cfg(test)]\nuse x;\nb\n#[cfg(test)]\nmod t {\n f(|a| { [1; 2] });\n}\nc\n";
        let marked: Vec<bool> = split(source).iter().map(|line| line.in_test).collect();
        assert_eq!(
            marked,
            [false, true, true, false, true, true, true, true, false]
        );
    }

    #[test]
    fn modules_are_found_under_their_attribute() {
        let source = "#[cfg(all(test, loom))]\nmod model;\n#[cfg(test)]\n#[path = \"y.rs\"]\n\
                      pub(crate) mod x {\n}\n#[cfg(test)] use a;\nmod plain;\n";
        let lines = split(source);
        assert_eq!(modules_under(&lines, &LOOM_ATTRIBUTES), ["model"]);
        assert_eq!(modules_under(&lines, &TEST_ATTRIBUTES), ["model", "x"]);
    }
}
