//! A TOML document, read key by key. What was asked for is what is known: every
//! other key of a section is a fault, so no list of keys is kept elsewhere.
//! Nothing ends the reading but a syntax error: all faults are gathered, each
//! with its line.

use std::cell::RefCell;
use std::ops::Range;

use serde::de::{DeserializeOwned, IntoDeserializer, value};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::error::Fault;

/// A value and the line of the file on which it stands, counted from 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct At<T> {
    pub(crate) value: T,
    pub(crate) line: usize,
}

/// A plan file and what is wrong with it so far.
#[derive(Debug)]
pub(super) struct Document<'t> {
    /// As the operator called it.
    name: &'t str,
    text: &'t str,
    faults: RefCell<Vec<(usize, Fault)>>,
}

impl<'t> Document<'t> {
    pub(super) fn new(name: &'t str, text: &'t str) -> Self {
        Self {
            name,
            text,
            faults: RefCell::new(Vec::new()),
        }
    }

    /// The document's table, or a fault with line and column.
    pub(super) fn parse(&self) -> Option<DeTable<'t>> {
        let error = match DeTable::parse(self.text) {
            Ok(table) => return Some(table.into_inner()),
            Err(error) => error,
        };
        let (line, column) = self.position(error.span().unwrap_or(0..0).start);
        let shown = self.text.lines().nth(line - 1).unwrap_or("").trim_end();
        self.faults.borrow_mut().push((
            line,
            Fault::new(
                format!("{}:{line}:{column}", self.name),
                format!("not TOML: {}\n{shown}", error.message()),
                format!("correct line {line}"),
            ),
        ));
        None
    }

    /// Line and column (in characters), counted from 1.
    fn position(&self, offset: usize) -> (usize, usize) {
        let before = self.text.get(..offset).unwrap_or(self.text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        let line = before.matches('\n').count() + 1;
        (line, before[line_start..].chars().count() + 1)
    }

    fn line(&self, span: Range<usize>) -> usize {
        self.position(span.start).0
    }

    /// Notes what is wrong on a line.
    pub(super) fn fault(
        &self,
        line: usize,
        object: &str,
        why: impl Into<String>,
        next: impl Into<String>,
    ) {
        let object = format!("{}:{line}, {object}", self.name);
        self.faults
            .borrow_mut()
            .push((line, Fault::new(object, why, next)));
    }

    /// Notes what is wrong with the whole file.
    pub(super) fn fault_of_file(&self, why: impl Into<String>, next: impl Into<String>) {
        self.faults
            .borrow_mut()
            .push((usize::MAX, Fault::new(self.name, why, next)));
    }

    pub(super) fn is_sound(&self) -> bool {
        self.faults.borrow().is_empty()
    }

    /// Everything that is wrong, in the order of the file.
    pub(super) fn into_faults(self) -> Vec<Fault> {
        let mut faults = self.faults.into_inner();
        faults.sort_by_key(|(line, _)| *line);
        faults.into_iter().map(|(_, fault)| fault).collect()
    }
}

/// A table of the document while it is read.
#[derive(Debug)]
pub(super) struct Section<'d, 't> {
    document: &'d Document<'t>,
    table: &'d DeTable<'t>,
    /// What it is called in a fault: `[switch]`, `port "vm1"`.
    pub(super) object: String,
    pub(super) line: usize,
    asked: Vec<&'static str>,
}

impl<'d, 't> Section<'d, 't> {
    /// The document itself.
    pub(super) fn root(document: &'d Document<'t>, table: &'d DeTable<'t>) -> Self {
        Self::new(document, table, "the plan".to_owned(), 1)
    }

    fn new(
        document: &'d Document<'t>,
        table: &'d DeTable<'t>,
        object: String,
        line: usize,
    ) -> Self {
        Self {
            document,
            table,
            object,
            line,
            asked: Vec::new(),
        }
    }

    fn get(&mut self, key: &'static str) -> Option<(&'d Spanned<DeValue<'t>>, usize)> {
        self.asked.push(key);
        let (key, value) = self.table.iter().find(|(name, _)| *name.get_ref() == key)?;
        Some((value, self.document.line(key.span())))
    }

    /// A fault of this section.
    pub(super) fn fault(&self, line: usize, why: impl Into<String>, next: impl Into<String>) {
        self.document.fault(line, &self.object, why, next);
    }

    fn wrong_type(&self, line: usize, key: &str, value: &DeValue<'_>, wanted: &str, example: &str) {
        let found = match value {
            DeValue::String(_) => "a string",
            DeValue::Integer(_) => "a whole number",
            DeValue::Float(_) => "a fraction",
            DeValue::Boolean(_) => "true or false",
            DeValue::Datetime(_) => "a date",
            DeValue::Array(_) => "a list",
            DeValue::Table(_) => "a table",
        };
        self.fault(
            line,
            format!("`{key}` is {found} and has to be {wanted}"),
            format!("write {example}"),
        );
    }

    /// A string that is not empty and can be shown.
    pub(super) fn text(&mut self, key: &'static str) -> Option<At<String>> {
        let (value, line) = self.get(key)?;
        let Some(text) = value.get_ref().as_str() else {
            let example = format!("{key} = \"…\", with quotes");
            self.wrong_type(line, key, value.get_ref(), "a string", &example);
            return None;
        };
        if text.is_empty() {
            self.fault(line, format!("`{key}` is empty"), "give it a value");
            return None;
        }
        if text.contains(char::is_control) {
            self.fault(
                line,
                format!("`{key}` contains a control character"),
                "leave it out",
            );
            return None;
        }
        Some(At {
            value: text.to_owned(),
            line,
        })
    }

    /// Like [`text`](Self::text), and a fault if it is missing.
    pub(super) fn required_text(&mut self, key: &'static str) -> Option<At<String>> {
        if !self.has(key) {
            self.missing(key, &format!("{key} = \"…\""));
        }
        self.text(key)
    }

    pub(super) fn flag(&mut self, key: &'static str) -> Option<bool> {
        let (value, line) = self.get(key)?;
        let flag = value.get_ref().as_bool();
        if flag.is_none() {
            let example = format!("{key} = true or {key} = false, without quotes");
            self.wrong_type(line, key, value.get_ref(), "true or false", &example);
        }
        flag
    }

    /// A whole number from 0; a fault if it is missing.
    pub(super) fn required_number(&mut self, key: &'static str) -> Option<At<usize>> {
        let example = format!("{key} = 0, without quotes");
        let Some((value, line)) = self.get(key) else {
            self.missing(key, &example);
            return None;
        };
        let Some(integer) = value.get_ref().as_integer() else {
            self.wrong_type(line, key, value.get_ref(), "a whole number", &example);
            return None;
        };
        let number = usize::from_str_radix(integer.as_str(), integer.radix());
        if number.is_err() {
            self.fault(
                line,
                format!("`{key}` is {integer}, and has to be a number from 0"),
                format!("write {example}"),
            );
        }
        number.ok().map(|value| At { value, line })
    }

    /// One of the names by which `T` is deserialised; `names` lists them for
    /// the fault.
    pub(super) fn choice<T: DeserializeOwned>(
        &mut self,
        key: &'static str,
        names: &[&str],
    ) -> Option<At<T>> {
        let At { value: name, line } = self.text(key)?;
        let deserializer: value::StrDeserializer<'_, value::Error> =
            name.as_str().into_deserializer();
        let choice = T::deserialize(deserializer).ok();
        if choice.is_none() {
            self.fault(
                line,
                format!("there is no {key} \"{name}\""),
                did_you_mean(&name, names, '"')
                    .unwrap_or_else(|| format!("use {}", list(names, '"', " or "))),
            );
        }
        choice.map(|value| At { value, line })
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.table.iter().any(|(name, _)| *name.get_ref() == key)
    }

    pub(super) fn missing(&self, key: &str, example: &str) {
        self.fault(
            self.line,
            format!("`{key}` is missing"),
            format!("add {example}"),
        );
    }

    /// The table `[path]` that `key` names here.
    pub(super) fn section(&mut self, key: &'static str, path: &str) -> Option<Section<'d, 't>> {
        let (value, line) = self.get(key)?;
        let Some(table) = value.get_ref().as_table() else {
            let example = format!("[{path}] on a line of its own, and its keys below");
            self.wrong_type(line, key, value.get_ref(), "one table", &example);
            return None;
        };
        Some(Section::new(
            self.document,
            table,
            format!("[{path}]"),
            line,
        ))
    }

    /// The tables `[[path]]` that `key` names here.
    pub(super) fn sections(&mut self, key: &'static str, path: &str) -> Vec<Section<'d, 't>> {
        let Some((value, key_line)) = self.get(key) else {
            return Vec::new();
        };
        let example = format!("[[{path}]] on a line of its own, and the keys of one {key} below");
        let Some(values) = value.get_ref().as_array() else {
            self.wrong_type(key_line, key, value.get_ref(), "a list of tables", &example);
            return Vec::new();
        };
        let mut sections = Vec::new();
        for value in values.iter() {
            let line = self.document.line(value.span());
            match value.get_ref().as_table() {
                Some(table) => sections.push(Section::new(
                    self.document,
                    table,
                    format!("[[{path}]]"),
                    line,
                )),
                None => self.wrong_type(line, key, value.get_ref(), "a list of tables", &example),
            }
        }
        sections
    }

    /// Ends the reading: what nobody asked for is a fault.
    pub(super) fn finish(self) {
        for key in self.table.keys() {
            let name = key.get_ref();
            if self.asked.iter().any(|asked| asked == name) {
                continue;
            }
            let line = self.document.line(key.span());
            self.fault(
                line,
                format!("the key `{name}` is not known here"),
                did_you_mean(name, &self.asked, '`').unwrap_or_else(|| {
                    format!("remove it; known here: {}", list(&self.asked, '`', ", "))
                }),
            );
        }
    }
}

/// A question with the name that is nearest to `name`, if one is near. The
/// quote stands around it.
pub(super) fn did_you_mean(name: &str, known: &[&str], quote: char) -> Option<String> {
    let lower = name.to_lowercase();
    known
        .iter()
        .map(|known| {
            (
                strsim::damerau_levenshtein(&lower, &known.to_lowercase()),
                known,
            )
        })
        .filter(|(distance, known)| *distance <= known.len().div_ceil(3) && *distance < known.len())
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, known)| format!("did you mean {quote}{known}{quote}?"))
}

/// Names in quotes, with a separator between them.
pub(super) fn list(names: &[&str], quote: char, separator: &str) -> String {
    let quoted: Vec<String> = names
        .iter()
        .map(|name| format!("{quote}{name}{quote}"))
        .collect();
    quoted.join(separator)
}
